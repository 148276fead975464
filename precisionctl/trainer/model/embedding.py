"""Tokens as hidden states.

Shape letters: B batch, S sequence, T tokens, E hidden_size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_shape import ModelShape
from precisionctl.trainer.backends.base import Backend, norm_of, plain_linear
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.model.layers.altup import project_streams, stream_projections


class Embedding(nn.Module):
    """Tokens as hidden states, with learned positions where the model has them."""

    def __init__(self, model: ModelShape, backend: Backend) -> None:
        super().__init__()
        self.ranks = backend.world.tensor
        self.word_embeddings = WordEmbeddings(model.padded_vocab_size, model.hidden_size, backend)
        self.position_embeddings: nn.Embedding | None = None
        if model.learned_positions:
            rows, dtype, device = model.position_rows, backend.dtype, backend.device
            self.position_embeddings = nn.Embedding(rows, model.hidden_size, dtype=dtype, device=device)
            nn.init.normal_(self.position_embeddings.weight, std=0.02)
        self.multiplier, self.rounded_multiplier = model.embedding_multiplier, model.rounded_embedding_multiplier
        self.layernorm = backend.norm(model.hidden_size, norm_of(model)) if model.embedding_layernorm else nn.Identity()
        self.norm_epsilon = model.norm_epsilon if model.embedding_norm else None
        self.per_layer_embedding: WordEmbeddings | None = None
        if model.per_layer_embed_dim:
            self.per_layer_embedding = WordEmbeddings(model.padded_vocab_size, model.per_layer_embed_size, backend)
            self.per_layer_model_proj = plain_linear(model.hidden_size, model.per_layer_embed_size, backend)
            self.per_layer_proj_norm = backend.norm(model.per_layer_embed_dim, norm_of(model))
        self.per_layer_tokens = model.per_layer_tokens
        self.rounded_per_layer = model.rounded_per_layer_multipliers
        self.altup_projections = stream_projections(model, backend) if model.altup else None
        self.layers = model.num_layers
        self.lerope = LeRope(model.rotary_pairs, backend) if model.lerope else None

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        """`[B, S]`, at positions `[S]` or `[B, S]`, to `[T, E]`."""
        hidden: Tensor = self.word_embeddings(tokens.flatten())
        if self.multiplier != 1:
            hidden = hidden * (hidden.new_full((), self.multiplier) if self.rounded_multiplier else self.multiplier)
        if self.position_embeddings is not None:
            # the padding that fills a batch up for FP8 GEMMs may lie beyond the last position
            known = position.clamp(max=self.position_embeddings.num_embeddings - 1)
            hidden = hidden + self.position_embeddings(self.ranks.local_tokens(known.expand_as(tokens).flatten()))
        if self.norm_epsilon is not None:
            hidden = F.rms_norm(hidden, hidden.shape[-1:], eps=self.norm_epsilon)
        normed: Tensor = self.layernorm(hidden)
        return normed

    def per_layer(self, tokens: Tensor, hidden: Tensor) -> list[Tensor] | None:
        """What each layer reads of tokens `[B, S]`, whose embedding is `hidden` `[T, E]`: `[T, P]`, P being
        per_layer_embed_dim. None where layers read hidden states alone."""
        if self.per_layer_embedding is None:
            return None
        known = tokens.flatten()
        known = torch.where(known < self.per_layer_tokens, known, 0)
        own = self.per_layer_embedding(known).unflatten(1, (self.layers, -1))
        own = own * own.new_full((), own.shape[-1] ** 0.5)
        of_context, of_sum = (
            own.new_full((), multiplier) if self.rounded_per_layer else multiplier
            for multiplier in (hidden.shape[-1] ** -0.5, 2**-0.5)
        )
        context = product(F.linear, hidden, self.per_layer_model_proj.weight) * of_context
        context = self.per_layer_proj_norm(context.view_as(own))
        return list(((context + own) * of_sum).unbind(1))

    def streams(self, hidden: Tensor) -> Tensor:
        """The residual streams that the first layer reads, `[T, N * E]`, where these are projections of the embedding
        `[T, E]`; else that itself."""
        return hidden if self.altup_projections is None else project_streams(hidden, self.altup_projections)


class LeRope(nn.Module):
    """What angles of rotary embeddings are multiplied by, as logarithms, FP32; for all layers. It is not trained."""

    def __init__(self, pairs: int, backend: Backend) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(pairs, device=backend.device), requires_grad=False)


class WordEmbeddings(nn.Embedding):
    """Rows of the vocabulary; of tensor ranks, each has some of them."""

    def __init__(self, rows: int, columns: int, backend: Backend) -> None:
        self.ranks = backend.world.tensor
        super().__init__(rows // self.ranks.size, columns, dtype=backend.dtype, device=backend.device)
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[T]` to `[T, E]`, of this rank's tokens."""
        if self.ranks.size == 1:
            return super().forward(tokens)
        mine = tokens - self.ranks.rank * self.num_embeddings
        others = (mine < 0) | (mine >= self.num_embeddings)
        return self.ranks.leave(super().forward(mine.masked_fill(others, 0)).masked_fill(others[:, None], 0))
