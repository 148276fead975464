"""Gates between blocks and the residual stream (Muse Spark).

Shape letters: T tokens, E hidden_size.
"""

import torch
from torch import Tensor, nn

from precisionctl.trainer.backends.base import Backend

_LEAST = 1e-3
"""The square of the least weight of the residual stream (transformers' MuseSparkResidualGate)."""


class ResidualGate(nn.Module):
    """Weights for each channel, by which a block is added to the residual stream. If the two were independent and had
    the same norm, their sum would have it too."""

    def __init__(self, hidden_size: int, temperature: float, backend: Backend) -> None:
        super().__init__()
        self.temperature = temperature
        self.gate = nn.Parameter(torch.zeros(hidden_size, dtype=backend.dtype, device=backend.device))

    def forward(self, hidden: Tensor, block: Tensor) -> Tensor:
        """The stream and what a block gives, both `[T, E]`, to the stream. Computed in FP32."""
        opened = self.gate.float() / self.temperature
        of_block = torch.sigmoid(opened)
        of_stream = (torch.sigmoid(-opened) * (1 + of_block)).clamp(min=_LEAST).sqrt()
        return (of_stream * hidden + of_block * block).to(hidden.dtype)
