"""Attention over grouped queries, with Megatron-Core's parameter names; and gates and scales that latent attention has
too (`latent_attention.py`).

Shape letters as in `gpt.py`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_shape import ModelShape
from precisionctl.model.sparse_parts import MSA
from precisionctl.trainer.backends.base import Backend, Norm, column_linear, norm_of, plain_linear
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.model.attention.core_attention import CoreAttention
from precisionctl.trainer.model.positions import rotate
from precisionctl.trainer.sequences import Positions


def gated_by(attended: Tensor, gate: Tensor) -> Tensor:
    """What heads give, `[T, heads * channels]`, times the sigmoid of as many numbers, computed in FP32."""
    return (attended * gate.float().sigmoid().reshape(attended.shape)).to(attended.dtype)


def times_by_head(attended: Tensor, factors: Tensor) -> Tensor:
    """What heads give, `[T, heads * channels]`, times FP32 numbers for each of them, or for each of their channels."""
    multiplied = attended.view(*factors.shape, -1) * factors[..., None]
    return multiplied.to(attended.dtype).view_as(attended)


def scaled(query: Tensor, positions: Positions) -> Tensor:
    """Queries `[B, S, heads, D]` as their positions scale them."""
    scale = positions.query_scale
    return query if scale is None else query * scale[..., None, None].to(query.dtype)


class NormOverHeads(nn.Module):
    """RMSNorm of all heads of a token together, of `size` channels (OLMo 2). A tensor rank has those of its heads, and
    the squares of all ranks are summed."""

    def __init__(self, size: int, norm: Norm, backend: Backend) -> None:
        super().__init__()
        self.ranks, self.size, self.norm = backend.world.tensor, size, norm
        mine = size // self.ranks.size
        self.weight = nn.Parameter(torch.full((mine,), norm.initial_weight, dtype=backend.dtype, device=backend.device))

    def forward(self, heads: Tensor) -> Tensor:
        """`[..., heads, D]` to the same."""
        wide = heads.flatten(-2).float()
        squares = self.ranks.copy(self.ranks.reduce(wide.square().sum(-1, keepdim=True)))
        normed = self.norm.multiplier(self.weight) * (wide * torch.rsqrt(squares / self.size + self.norm.epsilon))
        return normed.to(heads.dtype).view_as(heads)


class GateOfHeads(nn.Module):
    """What heads give is multiplied by what a projection of the hidden states makes, in FP32: its sigmoid or softplus,
    a number for each head or for each channel. A tensor rank has the rows of its heads."""

    def __init__(self, model: ModelShape, backend: Backend) -> None:
        super().__init__()
        sigmoid = (model.linear_gate or "").startswith("sigmoid")
        self.opening: Callable[[Tensor], Tensor] = torch.sigmoid if sigmoid else F.softplus
        rows = model.gate_size // backend.world.tensor.size
        self.weight = plain_linear(model.hidden_size, rows, backend).weight

    def forward(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """What heads give, `[T, heads * channels]`, and hidden states `[T, E]`, to the former times the gate."""
        return times_by_head(attended, self.opening(product(F.linear, hidden, self.weight).float()))


KeysValues = tuple[Tensor, ...]
"""Keys and values as attention takes them, `[B, S, G, channels]`. Of latent attention the latent `[T, C]`, normalised
if its norm is no part of the linear that reads it, and the part of keys that heads share, `[B, S, 1, channels]`."""


class SelfAttention(nn.Module):
    """Grouped queries. Rows of linear_qkv, per group: R queries, R output gates if there are, one key, each D rows, one
    value unless keys are values; of a layer that `shares_kv`, queries and gates alone. Behind those of all groups, one
    for each head if it has a head-wise gate. `model` is that of `of_layer` for this layer."""

    def __init__(
        self, name: str, model: ModelShape, backend: Backend, shares_kv: bool = False, msa: MSA | None = None
    ) -> None:
        super().__init__()
        self.name, self.backend = f"{name}.core_attention", backend
        self.groups, self.head = model.num_query_groups // backend.world.tensor.size, model.kv_channels
        norm, hidden = norm_of(model), model.hidden_size
        bias = model.add_bias_linear or model.add_qkv_bias
        own = () if shares_kv else (self.head,) if model.keys_are_values else (self.head, model.value_channels)
        self.own_kv: tuple[int, ...] = own  # rows of the key and value of a group
        rows = model.qkv_size - (model.key_value_size if shares_kv else 0)
        self.fused_layernorm = model.fused_input_layernorm
        self.linear_qkv: Any = column_linear(
            backend, f"{name}.linear_qkv", hidden, rows, bias, norm if self.fused_layernorm else None
        )
        self.q_layernorm: nn.Module = nn.Identity()
        self.k_layernorm: nn.Module = nn.Identity()
        if model.qk_layernorm and model.qk_layernorm_over_heads:
            self.q_layernorm = NormOverHeads(model.query_size, norm, backend)
            self.k_layernorm = NormOverHeads(model.key_size, norm, backend)
        elif model.qk_layernorm:
            self.q_layernorm, self.k_layernorm = backend.norm(self.head, norm), backend.norm(self.head, norm)
        if shares_kv:
            self.k_layernorm = nn.Identity()
            if model.stores_unused:  # parameters that a checkpoint has, with which nothing computes: whole on all ranks
                made: Any = {"bias": False, "dtype": backend.dtype, "device": backend.device}
                self.unused_linear_k = nn.Linear(hidden, model.key_size, **made)
                self.unused_linear_v = nn.Linear(hidden, model.key_size, **made)
                self.unused_k_norm = backend.norm(self.head, norm)
                for module in (self.unused_linear_k, self.unused_linear_v, self.unused_k_norm):
                    module.requires_grad_(False)
        self.l2_epsilon = norm.epsilon
        self.qk_l2_norm, self.v_l2_norm = model.qk_l2_norm, model.v_l2_norm
        if model.qk_l2_norm and model.qk_l2_norm_everywhere:
            self.q_layernorm = self.k_layernorm = nn.RMSNorm(self.head, norm.epsilon, elementwise_affine=False)
            self.qk_l2_norm = False
        self.value_scale, self.clip = model.attention_value_scale, model.clip_qkv
        self.interleaved, self.norms_after_rope = model.rotary_interleaved, model.qk_layernorm_after_rope
        self.gated = model.attention_output_gate
        self.head_gates = model.qkv_parts[1] // backend.world.tensor.size  # this rank's rows of them
        self.value_channels = model.value_channels
        self.output_norm: nn.Module | None = None
        if model.attention_output_norm:
            self.output_norm = nn.RMSNorm(self.value_channels, norm.epsilon, elementwise_affine=False)
        self.key_factor = model.multipliers.key if model.multipliers else 1.0
        self.linear_gate = GateOfHeads(model, backend) if model.linear_gate else None
        scale = 1 / math.sqrt(model.query_pre_attn_scalar or self.head)
        self.core_attention = CoreAttention(model, backend, scale, msa)
        self.linear_proj = backend.linear(
            f"{name}.linear_proj", model.projection_size, hidden, model.add_bias_linear or model.proj_bias, "row"
        )

    def forward(
        self, hidden: Tensor, positions: Positions, shared: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        """`[T, E]` to the same, and the keys and values that it read: the `shared` ones of another layer, or its
        own."""
        qkv, head_gates = self.linear_qkv(hidden), None
        if self.head_gates:
            qkv, head_gates = torch.split(qkv, [qkv.shape[-1] - self.head_gates, self.head_gates], -1)
        qkv = qkv.reshape(*positions.shape, self.groups, -1)
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        # split, and not sliced: their gradients are then put together once, instead of added to zeros one by one
        query, *own = torch.split(qkv, [qkv.shape[3] - sum(self.own_kv), *self.own_kv], 3)
        query = query.reshape(*positions.shape, -1, self.head)
        if self.gated:
            of_groups = query.view(*positions.shape, self.groups, 2, -1, self.head)
            query, gate = (part.flatten(2, 3) for part in of_groups.unbind(3))
        query = scaled(self._rotated(query, self.q_layernorm, positions), positions)
        if shared is None:
            key = own[0] if self.key_factor == 1 else own[0] * self.key_factor
            key, value = self._rotated(key, self.k_layernorm, positions), own[-1]
            if self.v_l2_norm:
                value = F.rms_norm(value, value.shape[-1:], eps=self.l2_epsilon)
            if self.value_scale != 1:
                value = value * self.value_scale
        else:
            key, value = shared
        if recorder := self.backend.recorder:
            recorder.kv_cache(self.name, "k", key)
            recorder.kv_cache(self.name, "v", value)
        attended = self.core_attention(query, key, value, positions, self._index(hidden, positions))
        if self.output_norm is not None:
            attended = self.output_norm(attended.unflatten(-1, (-1, self.value_channels))).flatten(-2)
        if self.gated:
            attended = gated_by(attended, gate)
        if head_gates is not None:
            attended = times_by_head(attended, head_gates.float().sigmoid())
        if self.linear_gate is not None:
            attended = self.linear_gate(attended, self.backend.world.tensor.enter(hidden))
        out: Tensor = self.linear_proj(attended)
        return out, (key, value)

    @torch.no_grad()
    def _index(self, hidden: Tensor, positions: Positions) -> tuple[Tensor, ...]:
        """What an indexer makes of hidden states `[T, E]`, in texts of which it does not choose all keys."""
        core, longest = self.core_attention, positions.packed.longest if positions.packed else positions.shape[1]
        if core.indexer is None or core.msa is None or longest <= core.msa.dense_length:
            return ()
        read = self.linear_qkv.gemm_input(hidden).to(hidden.dtype) if self.fused_layernorm else hidden
        index: tuple[Tensor, ...] = core.indexer(read, positions)
        return index

    def _rotated(self, heads: Tensor, norm: nn.Module, positions: Positions) -> Tensor:
        """Queries or keys `[B, S, heads, D]`, normalised and rotated by their positions."""
        if self.norms_after_rope:
            heads = norm(rotate(heads, positions, self.interleaved))
        else:
            heads = rotate(norm(heads), positions, self.interleaved)
        if self.qk_l2_norm and positions.cos is not None:
            heads = F.rms_norm(heads, (self.head,), eps=self.l2_epsilon)
        return heads
