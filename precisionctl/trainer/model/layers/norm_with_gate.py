"""A norm with a gate of its own (A.X K2), in the place of one that is no part of a linear."""

import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.trainer.backends.base import Backend, Norm
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.model.embedding import plain_linear


class NormWithGate(nn.Module):
    """What a norm gives is multiplied by the sigmoid of what a small MLP, by SiLU, makes of it. Every tensor rank has
    all of the MLP."""

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
