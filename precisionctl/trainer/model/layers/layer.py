"""A layer of attention and an MLP, or experts, as Megatron-Core's TransformerLayer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_parts import MoE
from precisionctl.model.model_shape import ModelShape
from precisionctl.trainer.backends.base import (
    Backend,
    add_post_layernorm,
    norm_of,
    plain_linear,
    post_norm_of,
)
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.model.attention.latent_attention import MLASelfAttention
from precisionctl.trainer.model.attention.self_attention import KeysValues, SelfAttention
from precisionctl.trainer.model.layers.layer_blocks import mixed, mlp_or_experts, token_mixer
from precisionctl.trainer.model.layers.residual_layer import Beside, ResidualLayer
from precisionctl.trainer.model.mlp import ACTIVATIONS, MoELayer
from precisionctl.trainer.model.norms import NormWithGate, ScaledNorm
from precisionctl.trainer.sequences import Positions

_LEAST_OF_STREAM = 1e-3
"""The square of the least weight of the residual stream (transformers' MuseSparkResidualGate)."""


class ResidualGate(nn.Module):
    """Weights for each channel (Muse Spark), by which a block is added to the residual stream. If the two were
    independent and had the same norm, their sum would have it too."""

    def __init__(self, hidden_size: int, temperature: float, backend: Backend) -> None:
        super().__init__()
        self.temperature = temperature
        self.gate = nn.Parameter(torch.zeros(hidden_size, dtype=backend.dtype, device=backend.device))

    def forward(self, hidden: Tensor, block: Tensor) -> Tensor:
        """The stream and what a block gives, both `[T, E]`, to the stream. Computed in FP32."""
        opened = self.gate.float() / self.temperature
        of_block = torch.sigmoid(opened)
        of_stream = (torch.sigmoid(-opened) * (1 + of_block)).clamp(min=_LEAST_OF_STREAM).sqrt()
        return (of_stream * hidden + of_block * block).to(hidden.dtype)


class Layer(ResidualLayer):
    """Attention and MLP, each added to the residual stream.

    Their norms live in linear_qkv (in_proj of a delta net or a short convolution) and linear_fc1, except before MLA,
    Kimi delta attention and experts, which have no such linear, where a gate (Laguna) or a low-rank residual (Gemma 3n)
    reads it too, and where both read one norm (Cohere). Gemma normalises once more, what is added, and OLMo 2 that
    alone, and Gemma 4 multiplies what the layer gives, after it has added what it makes of a token's embedding for this
    layer. Experts with norms of their own read what no norm has.
    """

    def __init__(self, name: str, model: ModelShape, number: int, backend: Backend, recompute: bool = False) -> None:
        super().__init__(model, number, backend, recompute)
        model = model.normed_as(number)
        moe = model.moe if model.has_experts(number) else None
        self.parallel_residual = model.parallel_residual
        of_kda = model.gdn is not None and model.gdn.kda and model.has_delta_net(number)
        fused_before = model.fused_input_layernorm if model.has_attention(number) else model.fused_layernorms
        separate = model.pre_layernorms and (model.mla or of_kda or not fused_before)
        self.input_layernorm = self._norm(model, backend) if separate else nn.Identity()
        self.self_attention = token_mixer(f"{name}.self_attention", model, number, backend)
        own_norm = moe and not moe.own_norms and model.pre_layernorms and not model.one_layernorm
        self.pre_mlp_layernorm = self._norm(model, backend) if own_norm else nn.Identity()
        fused = norm_of(model) if model.fused_layernorms else None
        self.mlp = mlp_or_experts(f"{name}.mlp", model, number, backend, fused)
        self.post_attention_residual_gate, self.post_feedforward_residual_gate = (
            ResidualGate(model.hidden_size, model.residual_gate_temperature, backend)
            if model.residual_gate_temperature
            else None
            for _ in range(2)
        )
        self._add_post_layernorms(model, moe, backend)
        ones = torch.ones(1, dtype=backend.dtype, device=backend.device)
        self.layer_scalar = nn.Parameter(ones, requires_grad=False) if model.layer_scalar else None
        self.per_layer_input_gate: nn.Linear | None = None
        if model.per_layer_embed_dim:
            self.per_layer_input_gate = plain_linear(model.hidden_size, model.per_layer_embed_dim, backend)
            self.per_layer_projection = plain_linear(model.per_layer_embed_dim, model.hidden_size, backend)
            self.post_per_layer_input_norm = backend.norm(model.hidden_size, post_norm_of(model))
            self.activation = ACTIVATIONS[model.activation]

    def _add_post_layernorms(self, model: ModelShape, moe: MoE | None, backend: Backend) -> None:
        """Make the norms of what attention and MLP give."""
        size, norm = model.hidden_size, norm_of(model)
        if model.post_layernorms:
            norm = post_norm_of(model)
            scaled, made = model.scaled_post_layernorms, self.self_attention
            given: Any = made.linear_proj if isinstance(made, SelfAttention | MLASelfAttention) else made.out_proj
            plain = nn.RMSNorm(size, norm.epsilon, elementwise_affine=False)
            add_post_layernorm(given, plain if scaled else backend.norm(size, norm))
            last = self.mlp if isinstance(self.mlp, MoELayer) else self.mlp.linear_fc2
            add_post_layernorm(last, ScaledNorm(size, norm, backend) if scaled else backend.norm(size, norm))
        elif moe and moe.post_layernorm:
            add_post_layernorm(self.mlp, backend.norm(size, norm))
        elif model.stores_unused and model.moe and model.moe.post_layernorm:
            self.mlp.unused_post_layernorm = backend.norm(size, norm).requires_grad_(False)

    @staticmethod
    def _norm(model: ModelShape, backend: Backend) -> nn.Module:
        """One that is no part of a linear."""
        if model.norm_gate_rank:
            return NormWithGate(model.hidden_size, model.norm_gate_rank, norm_of(model), backend)
        return backend.norm(model.hidden_size, norm_of(model))

    def _joined(self, hidden: Tensor, block: Tensor, gate: ResidualGate | None) -> Tensor:
        """The residual stream with what a block gives."""
        if gate is None:
            return self.added(hidden, block)
        joined: Tensor = gate(hidden, block)
        return joined

    def through(self, hidden: Tensor, positions: Positions, beside: Beside) -> tuple[Tensor, KeysValues | None]:
        normed = self.input_layernorm(hidden)
        attended, kept = mixed(self.self_attention, normed, positions, beside.shared)
        out = self._joined(hidden, attended, self.post_attention_residual_gate)
        made = self.mlp(self.pre_mlp_layernorm(normed if self.parallel_residual else out))
        out = self._joined(out, made, self.post_feedforward_residual_gate)
        if self.per_layer_input_gate is not None:
            out = out + self.of_per_layer_input(out, beside)
        return out if self.layer_scalar is None else out * self.layer_scalar, kept

    def of_per_layer_input(self, hidden: Tensor, beside: Beside) -> Tensor:
        """What the layer makes of a token's embedding for it, by a gate of hidden states; both, and the gate's input,
        `[T, E]`."""
        assert self.per_layer_input_gate is not None and beside.per_layer is not None, "it has a gate"
        gate = self.activation(product(F.linear, hidden, self.per_layer_input_gate.weight))
        added = product(F.linear, gate * beside.per_layer, self.per_layer_projection.weight)
        given: Tensor = self.post_per_layer_input_norm(added)
        return given
