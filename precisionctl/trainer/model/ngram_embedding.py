"""Embeddings of n-grams, found by hashes, which are added to residual streams (Qwen4-Exp's PLE), as transformers
computes them (modeling_qwen4_exp.py, Qwen4ExpTextPLELayer), with its parameter names.

Shape letters: B batch, S sequence, T tokens, N residual streams, E hidden_size, H heads of n-grams of all sizes.
"""

import math
from collections.abc import Iterable
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_parts import HyperConnections, NgramEmbedding
from precisionctl.model.model_shape import ModelShape
from precisionctl.trainer.backends.base import Backend, norm_of, plain_linear
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.model.norms import NormOfStreams
from precisionctl.trainer.model.recurrent.recurrence import by_text, convolution, convolved
from precisionctl.trainer.sequences import Positions


class HashedNgrams(nn.Module):
    """A layer's table of n-grams, and the numbers by which a token's last n-grams are found in it, which are not
    trained: a factor for each token of an n-gram, and the number of rows and the first row of each head."""

    def __init__(self, ple: NgramEmbedding, number: int, backend: Backend) -> None:
        super().__init__()
        self.ple, sizes = ple, ple.head_rows(number)

        def numbers(values: Iterable[int]) -> nn.Parameter:
            made = torch.tensor([*values], dtype=torch.int64, device=backend.device)
            return nn.Parameter(made, requires_grad=False)

        self.layer_multipliers = numbers([1] * ple.ngram_size)
        self.ngram_heads_vocab_sizes = numbers(sizes)
        self.ngram_heads_offsets = numbers(accumulate(sizes[:-1], initial=0))
        table = ple.table_rows(number), ple.head_dim
        self.ngram_embedding = nn.Embedding(*table, dtype=backend.dtype, device=backend.device)
        nn.init.normal_(self.ngram_embedding.weight, std=0.02)

    def forward(self, positions: Positions) -> Tensor:
        """`[T, embed_dim]`."""
        assert positions.tokens is not None, "GPT gives them to a model with n-grams"
        rows = by_text(self._rows, positions.tokens[:, None], positions)
        embedded: Tensor = self.ngram_embedding(rows)
        return embedded.flatten(1)

    def _rows(self, tokens: Tensor) -> Tensor:
        """Texts that are S tokens long, `[B, S, 1]`, to rows of the table, `[B, S, H]`."""
        ple, tokens = self.ple, tokens[..., 0]
        place = torch.arange(tokens.shape[1], device=tokens.device)
        ends = torch.where(tokens == ple.end_token, place, -1).cummax(1).values
        since = place - 1 - F.pad(ends[:, :-1], (1, 0), value=-1)  # tokens between the last end before this one and it
        mixed, rows = tokens * self.layer_multipliers[0], []
        for back in range(1, ple.ngram_size):
            earlier = F.pad(tokens, (back, 0), value=ple.end_token)[:, : tokens.shape[1]]
            earlier = torch.where(since >= back, earlier, ple.end_token)
            mixed = mixed ^ (earlier * self.layer_multipliers[back])
            heads = slice((back - 1) * ple.heads_per_ngram, back * ple.heads_per_ngram)
            of_heads = torch.remainder(mixed[..., None], self.ngram_heads_vocab_sizes[heads])
            rows.append(of_heads + self.ngram_heads_offsets[heads])
        return torch.cat(rows, -1)


class NgramLayer(nn.Module):
    """What a layer adds to its residual streams: one value made of a token's n-grams, in each stream by a gate that the
    stream and the n-grams open together; and a causal convolution of that over earlier tokens."""

    def __init__(
        self, model: ModelShape, ple: NgramEmbedding, mhc: HyperConnections, number: int, backend: Backend
    ) -> None:
        super().__init__()
        size, norm, streams = model.hidden_size, norm_of(model), mhc.num_residual_streams
        self.ple_embedding = HashedNgrams(ple, number, backend)
        self.key_proj = plain_linear(ple.embed_dim, model.streams_size, backend)
        self.value_proj = plain_linear(ple.embed_dim, size, backend)
        self.norm_key, self.norm_query, self.norm_conv = (NormOfStreams(streams, size, norm, backend) for _ in range(3))
        self.conv1d = convolution(model.streams_size, ple.conv_kernel_dim, backend, apart=ple.ngram_size)

    def forward(self, streams: Tensor, positions: Positions) -> Tensor:
        """`[T, N, E]` to the same."""
        embedded = self.ple_embedding(positions)
        key = self.norm_key(product(F.linear, embedded, self.key_proj.weight).view_as(streams))
        value = product(F.linear, embedded, self.value_proj.weight)
        fitting = (key * self.norm_query(streams)).sum(-1, keepdim=True, dtype=torch.float32) / math.sqrt(
            value.shape[-1]
        )
        gate = (fitting.abs().clamp_min(1e-6).sqrt() * fitting.sign()).sigmoid().to(value.dtype)
        gated = gate * value[:, None]
        beside = by_text(lambda texts: convolved(texts, self.conv1d), self.norm_conv(gated).flatten(1), positions)
        out: Tensor = gated + F.silu(beside).view_as(gated)
        return out
