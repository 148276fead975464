"""Attention over latents (MLA), with Megatron-Core's parameter names.

Shape letters as in `gpt.py`.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from precisionctl.model.model_parts import MLA, yarn_mscale
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.sparse_parts import DSA
from precisionctl.trainer.backends.base import Backend, column_linear, norm_of
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.model.attention.core_attention import CoreAttention
from precisionctl.trainer.model.attention.self_attention import GateOfHeads, KeysValues, gated_by, scaled
from precisionctl.trainer.model.positions import rotate
from precisionctl.trainer.sequences import Positions


def record_latent(recorder: Recorder, name: str, latent: Tensor, shared: Tensor) -> None:
    """Show what a KV cache holds: neither keys nor values, but what both are made of, the normalised latent and the
    part of keys that heads share, under one scale (vLLM's concat_and_cache_mla). That is `k`, and there is no `v`."""
    recorder.kv_cache(name, "k", latent)
    if shared.shape[-1]:
        recorder.kv_cache(name, "k", shared)


def keys_and_values(up: Tensor, shared: Tensor, channels: list[int]) -> tuple[Tensor, Tensor]:
    """Keys and values `[B, S, heads, channels]` of what is made of latents, `[T, heads * channels]`, for each head so
    many channels of a key and of a value, and of the part of keys that heads share, `[B, S, 1, channels]`."""
    own, value = torch.split(up.view(*shared.shape[:2], -1, sum(channels)), channels, -1)
    return torch.cat([own, shared.expand(*own.shape[:-1], -1)], -1), value


class SoftmaxScaling(nn.Module):
    """Two numbers of each head, which with the logarithm of a query's position say what it is multiplied by."""

    def __init__(self, heads: int, backend: Backend) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(heads, dtype=backend.dtype, device=backend.device))
        self.bias = nn.Parameter(torch.ones(heads, dtype=backend.dtype, device=backend.device))

    def forward(self, query: Tensor, positions: Positions) -> Tensor:
        """Queries `[B, S, heads, D]` to the same."""
        assert positions.query_scale is not None, "`query_scale` makes the logarithm"
        factor = positions.query_scale[..., None] * self.scale.float() + self.bias.float()
        return query * factor[..., None].to(query.dtype)


class Indexer(nn.Module):
    """What chooses keys in DeepSeek's sparse attention, carried along: it computes nothing, as all keys are chosen of
    texts as short as those that GPT takes, and no gradient comes to it."""

    def __init__(self, model: ModelShape, dsa: DSA, latent: int, backend: Backend) -> None:
        super().__init__()
        made: Any = {"bias": False, "dtype": backend.dtype, "device": backend.device}
        self.linear_wq_b = nn.Linear(latent, dsa.query_size, **made)
        self.linear_wk = nn.Linear(model.hidden_size, dsa.head_dim, **made)
        self.k_norm = nn.LayerNorm(dsa.head_dim, device=backend.device)  # FP32, as released
        self.linear_weights_proj = nn.Linear(model.hidden_size, dsa.n_heads, **made)
        if model.softmax_scaling:
            self.q_input_norm = nn.LayerNorm(latent, device=backend.device)
            self.softmax_scaling = SoftmaxScaling(dsa.n_heads, backend)
        if dsa.kpool:
            sizes = (dsa.kpool, dsa.head_dim), (dsa.head_dim, model.hidden_size)
            self.index_kpool_compress_ape, self.index_kpool_compress_gate = (
                nn.Parameter(torch.zeros(size, dtype=backend.dtype, device=backend.device)) for size in sizes
            )
        self.requires_grad_(False)


class MLASelfAttention(nn.Module):
    """DeepSeek's latent attention: the keys and values of all heads are made from one small latent for each token,
    queries from another one, or directly. All tensor ranks make the latents, of all tokens, and each its heads.

    Rows of linear_q_up_proj (linear_q_proj), per head: those without positions, then those with; of
    linear_kv_up_proj, per head: key, value; of linear_kv_down_proj: the latent, then the part of the key that has
    positions, which all heads share. Norms of the latents are part of the linears that read them, but not beside an
    indexer. Where queries come with gates, the latter stand behind the queries of their head. A layer that `shares_kv`
    reads the latent of another one.
    """

    def __init__(self, name: str, model: ModelShape, mla: MLA, number: int, backend: Backend) -> None:
        super().__init__()
        self.name, self.backend = f"{name}.core_attention", backend
        self.mla, self.fused_layernorms = mla, model.fused_latent_layernorms
        self.own_channels, self.shared_channels = mla.key_channels(model.has_rope(number))
        shares_kv = model.shares_kv(number)
        norm, hidden = norm_of(model), model.hidden_size
        fused = norm if self.fused_layernorms else None
        self.q_layernorm: nn.Module = nn.Identity()
        self.kv_layernorm = nn.Identity() if fused or shares_kv else backend.norm(mla.kv_lora_rank, norm)
        if mla.q_lora_rank is None:
            self.linear_q_proj = backend.linear(
                f"{name}.linear_q_proj", hidden, model.query_size, False, "inner column"
            )
        else:
            self.linear_q_down_proj = backend.linear(f"{name}.linear_q_down_proj", hidden, mla.q_lora_rank, False)
            self.q_layernorm = nn.Identity() if fused else backend.norm(mla.q_lora_rank, norm)
            self.linear_q_up_proj = column_linear(
                backend,
                f"{name}.linear_q_up_proj",
                model.query_up_inputs,
                model.query_up_size,
                False,
                fused,
                "inner column",
            )
        self.linear_kv_down_proj: nn.Module | None = None
        if not shares_kv:
            rows = mla.kv_lora_rank + self.shared_channels
            self.linear_kv_down_proj = backend.linear(f"{name}.linear_kv_down_proj", hidden, rows, False)
        rows = model.num_attention_heads * (self.own_channels + mla.v_head_dim)
        self.linear_kv_up_proj: Any = column_linear(
            backend, f"{name}.linear_kv_up_proj", mla.kv_lora_rank, rows, False, fused, "inner column"
        )
        heads = model.num_attention_heads // backend.world.tensor.size
        self.softmax_scaling = SoftmaxScaling(heads, backend) if model.softmax_scaling else None
        scale, scaling = 1 / math.sqrt(mla.qk_head_dim + mla.qk_pos_emb_head_dim), model.rope_scaling or {}
        if scaling.get("mscale_all_dim"):  # DeepSeek's YaRN magnifies the part without positions too, by the scores
            scale *= yarn_mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
        self.core_attention = CoreAttention(model, backend, scale)
        if model.dsa and model.has_indexer(number):
            self.core_attention.indexer = Indexer(model, model.dsa, mla.q_lora_rank or hidden, backend)
        self.linear_gate = GateOfHeads(model, backend) if model.linear_gate else None
        self.linear_proj = backend.linear(f"{name}.linear_proj", model.projection_size, hidden, False, "row")

    def forward(
        self, hidden: Tensor, positions: Positions, shared: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        """`[T, E]` to the same, and the latent that it read: the `shared` one of another layer, or its own."""
        mla, ranks = self.mla, self.backend.world.tensor
        hidden, heads = ranks.gather(hidden), (*positions.shape, -1)
        if mla.q_lora_rank is None:
            query = self.linear_q_proj(hidden)
        else:
            down = self.linear_q_down_proj(hidden)
            latent = self.q_layernorm(down)
            query = self.linear_q_up_proj(torch.cat([latent, down], -1) if mla.query_gate else latent)
        channels = [self.own_channels, self.shared_channels, mla.v_head_dim if mla.query_gate else 0]
        plain, unrotated, gate = torch.split(query.view(*heads, sum(channels)), channels, -1)
        if self.linear_kv_down_proj is not None:
            down = self.linear_kv_down_proj(hidden)
            latent, rotary = torch.split(down, [mla.kv_lora_rank, self.shared_channels], -1)
            latent = self.kv_layernorm(latent)
            rotary = ranks.copy(rotary).view(*positions.shape, 1, self.shared_channels)
            rotary = rotate(rotary, positions, interleaved=True)
        else:
            assert shared is not None, "the decoder gives it"
            latent, rotary = shared
        up = self.linear_kv_up_proj(latent)
        if recorder := self.backend.recorder:
            normed = self.linear_kv_up_proj.gemm_input(latent).to(latent.dtype) if self.fused_layernorms else latent
            record_latent(recorder, self.name, normed, rotary)
        key, value = keys_and_values(up, rotary, [self.own_channels, mla.v_head_dim])
        query = torch.cat([plain, rotate(unrotated, positions, interleaved=True)], -1)
        query = scaled(query, positions) if self.softmax_scaling is None else self.softmax_scaling(query, positions)
        attended = self.core_attention(query, key, value, positions)
        if self.linear_gate is not None:
            attended = self.linear_gate(attended, ranks.copy(hidden))
        if mla.query_gate:
            attended = gated_by(attended, gate)
        out: Tensor = self.linear_proj(attended)
        return out, (latent, rotary)
