"""Several residual streams (Xie et al., mHC, arXiv 2512.24880) with the parameter names of Megatron-Core's
hyper_connection.py. Streams that are not mixed have its parameters but those of the matrix.

Shape letters: T tokens, N residual streams, E hidden_size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_parts import HyperConnections
from precisionctl.model.model_shape import ModelShape
from precisionctl.trainer.backends.base import Backend, plain_linear


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
        number, epsilon = self.mhc.num_residual_streams, self.mhc.epsilon
        mapped = F.linear(_normed(streams, self.norm_epsilon), self.mapping_proj.weight.float())
        sizes = [number, number, mapped.shape[-1] - 2 * number]
        read, add, mix = torch.split(mapped, sizes, -1)
        biases = torch.split(self.bias.float(), sizes)
        read = torch.sigmoid(read * self.alpha_pre.float() + biases[0]) + epsilon
        add = self.mhc.magnitude * torch.sigmoid(add * self.alpha_post.float() + biases[1])
        if self.alpha_res is None:
            return _read(streams, read), add + epsilon, None
        mix = torch.unflatten(mix * self.alpha_res.float() + biases[2], -1, (number, number))
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
    given, mixed = add.to(dtype)[..., None] * block[:, None], torch.matmul(mix.to(dtype).mT, streams)
    return given.flatten(1) + mixed.flatten(1)


def add_head(module: nn.Module, model: ModelShape, mhc: HyperConnections, backend: Backend) -> None:
    """Give a module the parameters that make one of the streams, if any do: Megatron's decoder has them itself."""
    if mhc.mean_head:
        return
    made: Any = {"dtype": backend.dtype, "device": backend.device}
    number = mhc.num_residual_streams
    module.hc_head_fn = plain_linear(model.streams_size, number, backend).weight
    module.hc_head_base = nn.Parameter(torch.zeros(number, **made))
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
