"""Linears that no backend makes."""

from torch import nn

from precisionctl.trainer.backends.base import Backend


def plain_linear(inputs: int, outputs: int, backend: Backend) -> nn.Linear:
    """A linear without bias, of these sizes on every rank, that never computes in FP8."""
    made = nn.Linear(inputs, outputs, bias=False, dtype=backend.dtype, device=backend.device)
    nn.init.normal_(made.weight, std=0.02)
    return made
