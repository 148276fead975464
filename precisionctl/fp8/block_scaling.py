"""How the recipes of blocks cast, Float8BlockScaling and MXFP8BlockScaling: each block under the scale of its own amax.

TE quantizes a tensor twice, always from its own values: along its rows, for a product that sums over its columns, and
along its columns, for one that sums over its rows (quantize_transpose_vector_blockwise.cu, quantize_mxfp8.cuh). A copy
along the columns is the transpose's along the rows. A square block is the same both ways
(quantize_transpose_square_blockwise.cu).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from precisionctl.fp8 import numerics

ScaleOf = Callable[[Tensor], Tensor]
"""The scales of amaxes, FP32 both."""


def quantize(values: Tensor, block: tuple[int, int], scale_of: ScaleOf, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of `values` `[rows, columns]`, and the FP32 multipliers that decode blocks of so many rows and columns,
    `[down, across]`. Codes are `[down * block[0], across * block[1]]`: blocks at the edges are filled with zeros."""
    high, wide = block
    filled = F.pad(values.detach(), (0, -values.shape[1] % wide, 0, -values.shape[0] % high)).contiguous()
    lines = filled.view(-1, wide)  # of blocks, from left to right
    largest = numerics.row_amax(lines, numerics.scratch_for(lines))
    scale = scale_of(largest.view(filled.shape[0] // high, high, filled.shape[1] // wide).amax(1))
    codes = numerics.encode(lines, scale.repeat_interleave(high, 0).view(-1, 1), dtype)
    return codes.view(filled.shape), scale.reciprocal()
