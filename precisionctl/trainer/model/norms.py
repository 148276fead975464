"""Norms of other kinds than a backend's.

Shape letters: T tokens, N residual streams, E hidden_size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.trainer.backends.base import Backend, Norm, plain_linear
from precisionctl.trainer.backends.bf16_products import product


class ScaledNorm(nn.Module):
    """An RMSNorm that multiplies by its weight before it normalises (Muse Spark)."""

    def __init__(self, size: int, norm: Norm, backend: Backend) -> None:
        super().__init__()
        self.norm = norm
        made = torch.full((size,), norm.initial_weight, dtype=backend.dtype, device=backend.device)
        self.weight = nn.Parameter(made)

    def forward(self, values: Tensor) -> Tensor:
        scaled = (values.float() * self.norm.multiplier(self.weight)).to(values.dtype)
        return F.rms_norm(scaled, scaled.shape[-1:], eps=self.norm.epsilon)


class NormOfStreams(nn.Module):
    """RMSNorm of each of N streams of `size` channels by itself, with weights of their own. In FP32
    (Qwen4-Exp, Qwen4ExpTextGatedResidual)."""

    def __init__(self, streams: int, size: int, norm: Norm, backend: Backend) -> None:
        super().__init__()
        self.norm = norm
        weights = torch.full((streams * size,), norm.initial_weight, dtype=backend.dtype, device=backend.device)
        self.weight = nn.Parameter(weights)

    def forward(self, streams: Tensor) -> Tensor:
        """`[T, N, E]` to the same."""
        normed = F.rms_norm(streams.float(), streams.shape[-1:], eps=self.norm.epsilon)
        return (normed * self.norm.multiplier(self.weight).view(streams.shape[1:])).to(streams.dtype)


class NormWithGate(nn.Module):
    """What a norm that is no part of a linear gives is multiplied by the sigmoid of what a small MLP, by SiLU, makes of
    it (A.X K2). Every tensor rank has all of the MLP."""

    def __init__(self, size: int, rank: int, norm: Norm, backend: Backend) -> None:
        super().__init__()
        self.norm = backend.norm(size, norm)
        self.W_down = plain_linear(size, rank, backend)
        self.W_up = plain_linear(rank, size, backend)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[T, E]` to the same."""
        normed: Tensor = self.norm(hidden)
        inner = F.silu(product(F.linear, normed, self.W_down.weight))
        gate = product(F.linear, inner, self.W_up.weight).float().sigmoid()
        return (normed * gate).to(normed.dtype)
