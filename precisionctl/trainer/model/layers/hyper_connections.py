"""Several residual streams, and a layer whose blocks are between them, as Megatron-Core's
HyperConnectionTransformerLayer.

What joins a block to the streams is of two kinds. HyperConnection (Xie et al., mHC, arXiv 2512.24880) has the parameter
names of Megatron-Core's hyper_connection.py; streams that are not mixed have its parameters but those of the matrix.
GatedResidual (Qwen4-Exp) has a weight to read each channel by, as in transformers (modeling_qwen4_exp.py,
Qwen4ExpTextGatedResidual).

Shape letters: T tokens, N residual streams, E hidden_size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_parts import HyperConnections
from precisionctl.model.model_shape import ModelShape
from precisionctl.trainer.backends.base import Backend, norm_of, plain_linear
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.model.attention.self_attention import KeysValues
from precisionctl.trainer.model.layers.layer_blocks import mixed, mlp_or_experts, token_mixer
from precisionctl.trainer.model.layers.residual_layer import Beside, ResidualLayer
from precisionctl.trainer.model.mlp import MoELayer
from precisionctl.trainer.model.ngram_embedding import NgramLayer
from precisionctl.trainer.model.norms import NormOfStreams
from precisionctl.trainer.sequences import Positions


class HyperConnection(nn.Module):
    """What joins a block to the residual streams: for each token, made of its streams, weights to read them by, weights
    to add to them by, and a matrix that mixes them. All in FP32."""

    def __init__(self, model: ModelShape, mhc: HyperConnections, backend: Backend) -> None:
        super().__init__()
        self.mhc, self.norm_epsilon = mhc, model.norm_epsilon
        self.mapping_proj = plain_linear(model.streams_size, mhc.mapping_size, backend)
        self.bias = nn.Parameter(torch.zeros(mhc.mapping_size, dtype=backend.dtype, device=backend.device))
        self.alpha_pre, self.alpha_post, alpha_res = (
            nn.Parameter(torch.full((1,), 0.01, dtype=backend.dtype, device=backend.device)) for _ in range(3)
        )
        self.alpha_res = alpha_res if mhc.mixed else None

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Streams `[T, N, E]` to what a block reads, `[T, E]`, and FP32 weights to add by, `[T, N]`, and to mix by,
        `[T, N, N]`; None where streams are not mixed."""
        count, epsilon = self.mhc.num_residual_streams, self.mhc.epsilon
        mapped = F.linear(_normed(streams, self.norm_epsilon), self.mapping_proj.weight.float())
        sizes = [count, count, mapped.shape[-1] - 2 * count]
        read, add, mix = torch.split(mapped, sizes, -1)
        biases = torch.split(self.bias.float(), sizes)
        read = torch.sigmoid(read * self.alpha_pre.float() + biases[0]) + epsilon
        add = self.mhc.magnitude * torch.sigmoid(add * self.alpha_post.float() + biases[1])
        if self.alpha_res is None:
            return _read(streams, read), add + epsilon, None
        mix = torch.unflatten(mix * self.alpha_res.float() + biases[2], -1, (count, count))
        return _read(streams, read), add, self._stochastic(mix.softmax(-1) + epsilon)

    def _stochastic(self, mix: Tensor) -> Tensor:
        """Matrices `[T, N, N]`, made doubly stochastic (Sinkhorn and Knopp)."""
        iterations, epsilon = self.mhc.mhc_sinkhorn_iterations or 1, self.mhc.epsilon
        mix = mix / (mix.sum(-2, keepdim=True) + epsilon)
        for _ in range(iterations - 1):
            mix = mix / (mix.sum(-1, keepdim=True) + epsilon)
            mix = mix / (mix.sum(-2, keepdim=True) + epsilon)
        return mix


def added(streams: Tensor, block: Tensor, add: Tensor, mix: Tensor | None) -> Tensor:
    """Streams `[T, N, E]`, mixed, with what a block gives, `[T, E]`, in each: `[T, N * E]`, and no view, since FSDP2
    wants none of a layer. Streams that are not mixed are added to in FP32."""
    dtype = streams.dtype
    if mix is None:
        given = add[..., None] * block.float()[:, None]
        return (given.flatten(1) + streams.flatten(1).float()).to(dtype)
    given, streams = add.to(dtype)[..., None] * block[:, None], torch.matmul(mix.to(dtype).mT, streams)
    return given.flatten(1) + streams.flatten(1)


def add_head(module: nn.Module, model: ModelShape, mhc: HyperConnections, backend: Backend) -> None:
    """Give a module the parameters that make one of the streams, if any do: Megatron's decoder has them itself."""
    if mhc.mean_head:
        return
    made: Any = {"dtype": backend.dtype, "device": backend.device}
    count = mhc.num_residual_streams
    module.hc_head_fn = plain_linear(model.streams_size, count, backend).weight
    module.hc_head_base = nn.Parameter(torch.zeros(count, **made))
    module.hc_head_scale = nn.Parameter(torch.ones(1, **made))


def contracted(streams: Tensor, module: Any, model: ModelShape, mhc: HyperConnections) -> Tensor:
    """One of the streams `[T, N, E]`, `[T, E]`, by the parameters of `add_head`, or their mean."""
    if mhc.mean_head:
        return streams.mean(1)
    mapped = F.linear(_normed(streams, model.norm_epsilon), module.hc_head_fn.float())
    read = torch.sigmoid(mapped * module.hc_head_scale.float() + module.hc_head_base.float()) + mhc.epsilon
    return _read(streams, read)


def _normed(streams: Tensor, epsilon: float) -> Tensor:
    """All streams of a token together, `[T, N * E]`, normalised by no weights, FP32."""
    wide = streams.flatten(1).float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)


def _read(streams: Tensor, weights: Tensor) -> Tensor:
    """The sum of streams `[T, N, E]` by weights `[T, N]`."""
    return (weights[..., None] * streams).sum(1).to(streams.dtype)


class GatedResidual(nn.Module):
    """What joins a block to the residual streams. One that `adds` nothing makes a stream of them all, behind the last
    layer. Every tensor rank has all of it."""

    def __init__(self, model: ModelShape, mhc: HyperConnections, backend: Backend, adds: bool = True) -> None:
        super().__init__()
        self.streams, self.magnitude = mhc.num_residual_streams, mhc.magnitude
        assert mhc.lowrank, "others have a `HyperConnection`"
        self.hc_norm = NormOfStreams(self.streams, model.hidden_size, norm_of(model), backend)
        self.input_mix_weight_down = plain_linear(model.streams_size, mhc.lowrank, backend)
        self.input_mix_weight_up = plain_linear(mhc.lowrank, model.streams_size, backend)
        self.block_inject_weight = plain_linear(model.streams_size, self.streams, backend) if adds else None

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, None]:
        """Streams `[T, N, E]` to what a block reads, `[T, E]`, and FP32 weights to add by, `[T, N]`, 1 where nothing is
        added; streams are not mixed."""
        normed = self.hc_norm(streams)
        wide = normed.flatten(1)
        inner = F.silu(product(F.linear, wide, self.input_mix_weight_down.weight) / self.streams)
        weights = product(F.linear, inner, self.input_mix_weight_up.weight).float().sigmoid()
        read = (weights.view_as(normed) * normed).mean(1).to(streams.dtype)
        if self.block_inject_weight is None:
            return read, read.new_ones(()), None
        add = product(F.linear, wide, self.block_inject_weight.weight).float() / self.streams
        return read, self.magnitude * add.sigmoid(), None


class HyperLayer(ResidualLayer):
    """Attention, a gated delta net or Kimi delta attention, and experts or an MLP, whose norm lives in it, each between
    the streams. Hidden states are `[T, N * E]`. There are no norms where connections normalise the streams. Embeddings
    of n-grams are added first."""

    def __init__(
        self,
        name: str,
        model: ModelShape,
        mhc: HyperConnections,
        number: int,
        backend: Backend,
        recompute: bool = False,
    ) -> None:
        super().__init__(model, number, backend, recompute)
        norm, self.streams = norm_of(model), mhc.num_residual_streams
        connection = GatedResidual if mhc.lowrank else HyperConnection
        self.ple: NgramLayer | None = None
        if model.ple and model.has_ngrams(number):
            self.ple = NgramLayer(model, model.ple, mhc, number, backend)
        self.self_attention_hyper_connection = connection(model, mhc, backend)
        self.input_layernorm = backend.norm(model.hidden_size, norm) if model.pre_layernorms else nn.Identity()
        self.self_attention = token_mixer(f"{name}.self_attention", model, number, backend)
        self.mlp_hyper_connection = connection(model, mhc, backend)
        own_norm = model.has_experts(number) and model.pre_layernorms
        self.pre_mlp_layernorm = backend.norm(model.hidden_size, norm) if own_norm else nn.Identity()
        fused = norm if model.fused_layernorms else None
        self.mlp = mlp_or_experts(f"{name}.mlp", model, number, backend, fused)

    def through(self, hidden: Tensor, positions: Positions, beside: Beside) -> tuple[Tensor, KeysValues | None]:
        streams = torch.unflatten(hidden, -1, (self.streams, -1))
        if self.ple is not None:
            streams = streams + self.ple(streams, positions)
        read, add, mix = self.self_attention_hyper_connection(streams)
        attended, kept = mixed(self.self_attention, self.input_layernorm(read), positions, beside.shared)
        hidden = added(streams, attended, add, mix)
        streams = torch.unflatten(hidden, -1, (self.streams, -1))
        read, add, mix = self.mlp_hyper_connection(streams)
        normed = self.pre_mlp_layernorm(read)
        made = self.mlp(normed, positions.tokens) if isinstance(self.mlp, MoELayer) else self.mlp(normed)
        return added(streams, made, add, mix), kept


class HyperMTPLayer(nn.Module):
    """The parameters of a layer of multi-token prediction between streams, which are carried along and not trained."""

    def __init__(self, model: ModelShape, backend: Backend) -> None:
        super().__init__()
        norm, size, mhc = norm_of(model), model.hidden_size, model.mhc
        assert mhc, "others have one of `MTPLayer`"
        self.enorm, self.hnorm = backend.norm(size, norm), backend.norm(size, norm)
        self.e_proj, self.h_proj = plain_linear(size, size, backend), plain_linear(size, size, backend)
        last = model.num_layers - 1
        self.transformer_layer = HyperLayer("mtp.transformer_layer", model.of_prediction, mhc, last, backend)
        self.final_layernorm = backend.norm(size, norm)
        add_head(self, model, mhc, backend)
