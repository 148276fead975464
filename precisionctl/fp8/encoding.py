"""Encoding: how stored FP8 codes were made, so that they can be read and made again."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Encoding:
    """Code dtype and dequantize multipliers (`x = code * scale_inv`, FP32).

    `scale_inv` is `[]` or `[1]` for one scale per tensor and `[rows, 1]` for one per output channel.
    """

    dtype: torch.dtype
    scale_inv: Tensor
