"""Encoding: how stored FP8 codes were made, so that they can be read and made again."""

from dataclasses import dataclass

import torch
from torch import Tensor

from precisionctl.fp8.numerics import decode


@dataclass(frozen=True)
class Encoding:
    """Code dtype and dequantize multipliers (`x = code * scale_inv`, FP32).

    `scale_inv` is `[]` or `[1]` for one scale per tensor and `[rows, 1]` for one per output channel.
    """

    dtype: torch.dtype
    scale_inv: Tensor

    def decode_rows(self, codes: Tensor, row0: int, dtype: torch.dtype) -> Tensor:
        """Values of `codes` `[n, columns]`, which are rows `[row0, row0 + n)` of the tensor."""
        per_row = self.scale_inv.dim() == 2
        return decode(codes, self.scale_inv[row0 : row0 + codes.shape[0]] if per_row else self.scale_inv, dtype)
