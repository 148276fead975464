"""DeepSeek-V4's attention to a window of keys and to compressed ones, with the parameter names of Megatron-Core's dev
branch (deepseek_v4_hybrid_attention.py, csa.py). Scores of all pairs are computed, in plain PyTorch.

Shape letters: B batch, S sequence, T tokens, W windows, E hidden_size, Q q_lora_rank; H heads of D channels, P pairs of
channels that are rotated.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_shape import ModelShape
from precisionctl.model.sparse_parts import CSA
from precisionctl.trainer.backends.base import Backend, norm_of, plain_linear
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.model.positions import keys_seen
from precisionctl.trainer.sequences import Positions


def rotate_last(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, in FP32, of the last 2 P channels of `[..., D]`, in pairs of neighbours, by angles
    `[..., P]`."""
    size = 2 * cos.shape[-1]
    plain, rotary = torch.split(heads, [heads.shape[-1] - size, size], -1)
    first, second = torch.unflatten(rotary.float(), -1, (-1, 2)).unbind(-1)
    pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([plain, pairs.flatten(-2).to(heads.dtype)], -1)


class Compressor(nn.Module):
    """One key for each window of tokens: a mean of what a linear makes of them, weighted channel by channel by a
    softmax over the window. With `overlaps` the window before takes part, by channels of its own."""

    def __init__(self, model: ModelShape, ratio: int, head: int, overlaps: bool, backend: Backend) -> None:
        super().__init__()
        self.ratio, self.overlaps, rows = ratio, overlaps, 2 * head if overlaps else head
        self.linear_wkv = plain_linear(model.hidden_size, rows, backend)
        self.linear_wgate = plain_linear(model.hidden_size, rows, backend)
        self.ape = nn.Parameter(torch.zeros(ratio, rows, dtype=backend.dtype, device=backend.device))
        self.norm = backend.norm(head, norm_of(model))

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[B, S, E]` to the keys of whole windows, `[B, W, D]`, rotated by the angles of their first tokens; these are
        `[B, S, P]`."""
        whole = hidden.shape[1] // self.ratio * self.ratio
        values, gates = (
            torch.unflatten(product(F.linear, hidden[:, :whole], each.weight), 1, (-1, self.ratio))
            for each in (self.linear_wkv, self.linear_wgate)
        )
        gates = gates + self.ape
        if self.overlaps:
            values, gates = _with_window_before(values, 0.0), _with_window_before(gates, -torch.inf)
        weights = gates.softmax(2, dtype=torch.float32).to(values.dtype)
        keys: Tensor = self.norm((values * weights).sum(2))
        return rotate_last(keys, cos[:, : whole : self.ratio], sin[:, : whole : self.ratio])


def _with_window_before(windows: Tensor, filling: float) -> Tensor:
    """`[B, W, ratio, 2 D]` to `[B, W, 2 ratio, D]`: the first half of the window before's channels, then the second
    half of its own."""
    before, own = windows.chunk(2, -1)
    before = F.pad(before[:, :-1], (0, 0, 0, 0, 1, 0), value=filling) if windows.shape[1] else before
    return torch.cat([before, own], 2)


class CompressedIndexer(nn.Module):
    """Chooses the compressed keys that a query sees. No gradient comes to it, and it is not trained."""

    def __init__(self, model: ModelShape, csa: CSA, backend: Backend) -> None:
        super().__init__()
        self.heads, self.head, self.topk = csa.n_heads, csa.head_dim, csa.topk
        self.linear_wq_b = plain_linear(csa.q_lora_rank, csa.query_size, backend)
        self.linear_weights_proj = plain_linear(model.hidden_size, csa.n_heads, backend)
        self.compressor = Compressor(model, CSA.RATIOS["C"], csa.head_dim, True, backend)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, hidden: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        """Which keys each query sees, bool `[B, S, W]`, of those that it may, `seen` `[S, W]`. Hidden states are
        `[B, S, E]`, latents `[B, S, Q]`."""
        keys = self.compressor(hidden, cos, sin)
        queries = torch.unflatten(product(F.linear, latent, self.linear_wq_b.weight), -1, (self.heads, self.head))
        queries = rotate_last(queries, cos[:, :, None], sin[:, :, None])
        scores = torch.matmul(queries.float(), keys.mT.float()[:, None]).relu() * self.head**-0.5  # [B, S, H, W]
        weights = product(F.linear, hidden, self.linear_weights_proj.weight).float() * self.heads**-0.5
        scores = (scores * weights[..., None]).sum(2).masked_fill(~seen, -torch.inf)
        best = scores.topk(min(self.topk, scores.shape[-1]), -1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & seen


class CompressedCore(nn.Module):
    """Softmax over the keys of the window, the compressed ones, and for each head a score of its own (`attn_sink`)
    whose value is zero. Keys are values."""

    def __init__(self, model: ModelShape, csa: CSA, number: int, backend: Backend) -> None:
        super().__init__()
        self.ratio, self.window, self.epsilon = CSA.RATIOS[csa.pattern[number]], csa.window_size, model.norm_epsilon
        heads, self.head = model.num_attention_heads, model.kv_channels
        self.attn_sink = nn.Parameter(torch.zeros(heads, dtype=backend.dtype, device=backend.device))
        self.compressor: Compressor | None = None
        self.indexer: CompressedIndexer | None = None
        if self.ratio:
            overlaps = csa.pattern[number] == "C"
            self.compressor = Compressor(model, self.ratio, self.head, overlaps, backend)
            self.indexer = CompressedIndexer(model, csa, backend) if overlaps else None

    def forward(self, query: Tensor, key: Tensor, hidden: Tensor, latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Of texts that are S tokens long: queries `[B, S, H * D]`, keys `[B, S, D]`, both not yet rotated, hidden
        states `[B, S, E]`, latents `[B, S, Q]` and angles `[B, S, P]`, to what heads give, `[B, S, H * D]`."""
        query = torch.unflatten(query, -1, (-1, self.head))
        query = query * torch.rsqrt(query.float().square().mean(-1, keepdim=True) + self.epsilon).to(query.dtype)
        query, key = rotate_last(query, cos[:, :, None], sin[:, :, None]), rotate_last(key, cos, sin)
        length = key.shape[1]
        mask = keys_seen(length, self.window, key.device).expand(len(key), -1, -1)
        if self.compressor is not None and length >= self.ratio:
            # of compressed keys those of windows that end before a query or with it, `[S, W]`, or some of them
            whole = (torch.arange(length, device=key.device) + 1) // self.ratio
            seen = torch.arange(length // self.ratio, device=key.device) < whole[:, None]
            if self.indexer is not None:
                seen = self.indexer(hidden, latent, cos, sin, seen)
            mask = torch.cat([mask, seen.expand(len(key), -1, -1)], -1)
            key = torch.cat([key, self.compressor(hidden, cos, sin)], 1)
        scores = product(torch.matmul, query.transpose(1, 2), key[:, None].mT).float() / math.sqrt(self.head)
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
        sinks = self.attn_sink.float()[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].to(key.dtype)
        given = product(torch.matmul, weights, key[:, None]).transpose(1, 2)
        return rotate_last(given, cos[:, :, None], -sin[:, :, None]).flatten(2)


class CompressedAttention(nn.Module):
    """Queries of all heads are made of a latent; one key, which is the value too, of the hidden states. What groups of
    heads give is projected each by itself, in BF16, and together."""

    def __init__(self, name: str, model: ModelShape, csa: CSA, number: int, backend: Backend) -> None:
        super().__init__()
        hidden, norm, self.groups = model.hidden_size, norm_of(model), csa.o_groups
        self.linear_q_down_proj = backend.linear(f"{name}.linear_q_down_proj", hidden, csa.q_lora_rank, False)
        self.q_layernorm = backend.norm(csa.q_lora_rank, norm)
        self.linear_q_up_proj = backend.linear(f"{name}.linear_q_up_proj", csa.q_lora_rank, model.query_size, False)
        self.linear_kv_proj = backend.linear(f"{name}.linear_kv_proj", hidden, model.kv_channels, False)
        self.kv_layernorm = backend.norm(model.kv_channels, norm)
        self.core_attention = CompressedCore(model, csa, number, backend)
        self.linear_o_group_proj = plain_linear(model.group_size, csa.grouped_size, backend).weight
        self.linear_proj = backend.linear(f"{name}.linear_proj", csa.grouped_size, hidden, False)

    def forward(self, hidden: Tensor, positions: Positions) -> Tensor:
        """`[T, E]` to the same."""
        latent = self.q_layernorm(self.linear_q_down_proj(hidden))
        query, key = self.linear_q_up_proj(latent), self.kv_layernorm(self.linear_kv_proj(hidden))
        assert positions.cos is not None and positions.sin is not None, "its layers have rotary embeddings"
        angles = (each.expand(*positions.shape, -1).flatten(0, 1) for each in (positions.cos, positions.sin))
        read = (query, key, hidden, latent, *angles)
        if positions.packed is None:
            given = self.core_attention(*(each.view(*positions.shape, -1) for each in read)).flatten(0, 1)
        else:  # each text by itself
            texts = zip(*(torch.split(each, list(positions.packed.lengths)) for each in read), strict=True)
            given = torch.cat([self.core_attention(*(each[None] for each in text))[0] for text in texts])
        groups = torch.unflatten(given, -1, (self.groups, -1)).transpose(0, 1)
        weights = torch.unflatten(self.linear_o_group_proj, 0, (self.groups, -1))
        projected = product(torch.matmul, groups, weights.mT).transpose(0, 1).flatten(1)
        out: Tensor = self.linear_proj(projected)
        return out
