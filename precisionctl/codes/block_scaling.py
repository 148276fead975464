"""The cast of TE's Float8BlockScaling and MXFP8BlockScaling: each block has a scale from its own amax.

TE quantizes a tensor twice, each time from the original values: in blocks along its rows, for a GEMM that sums over its
columns, and in blocks along its columns, for one that sums over its rows (quantize_transpose_vector_blockwise.cu,
quantize_mxfp8.cuh). The copy along the columns is the transpose quantized along its rows. Square blocks are the same
both ways (quantize_transpose_square_blockwise.cu).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from precisionctl.codes import numerics

ScaleOf = Callable[[Tensor], Tensor]
"""A function from amaxes to scales, both FP32."""


def quantize(values: Tensor, block: tuple[int, int], scale_of: ScaleOf, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of `values` `[rows, columns]` in blocks of `block` (rows, columns), and the FP32 scale_inv of each block,
    `[down, across]`. Codes are `[down * block[0], across * block[1]]`: values are padded with zeros to whole blocks."""
    high, wide = block
    missing = (0, -values.shape[1] % wide, 0, -values.shape[0] % high)
    filled = torch.nn.functional.pad(values.detach(), missing).contiguous()
    lines = filled.view(-1, wide)  # one row of one block each, from left to right
    largest = numerics.row_amax(lines, numerics.scratch_for(lines))
    scale = scale_of(largest.view(filled.shape[0] // high, high, filled.shape[1] // wide).amax(1))
    codes = numerics.encode(lines, scale.repeat_interleave(high, 0).view(-1, 1), dtype)
    return codes.view(filled.shape), scale.reciprocal()
