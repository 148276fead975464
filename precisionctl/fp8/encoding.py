"""Encoding: how stored FP8 codes were made, so that they can be read and made again."""

from dataclasses import dataclass

import torch
from torch import Tensor

from precisionctl.fp8 import numerics

CODES: tuple[torch.dtype, ...] = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
"""Dtypes that a weight's codes may have; the last two are AMD's, of another bias and without negative zero."""


@dataclass(frozen=True)
class Encoding:
    """Code dtype and a grid of dequantize multipliers: element (i, j) of a tensor seen as `[rows, columns]` is
    `code * scale_inv[i // block[0], j // block[1]]`, multiplied in FP32.

    `scale_inv` is `[ceil(rows / block[0]), ceil(columns / block[1])]`, in the dtype that it is stored in. One scale
    for a tensor is a block of all of it, one for each output channel a block of one row. Ragged edges are blocks
    that are cut off: DeepSeek's 576 rows have 5 rows of scales, the last for 64 of them.
    """

    dtype: torch.dtype
    scale_inv: Tensor
    block: tuple[int, int]

    def scales(self, row: int, rows: int, columns: int) -> Tensor:
        """FP32 scale_inv of each element of rows `[row, row + rows)`: `[rows, columns]`, or `[rows, 1]` or `[1, 1]`
        where that says the same."""
        high, wide = self.block
        grid = self.scale_inv
        if len(grid) > 1:
            grid = grid.view(_bits(grid.dtype))[torch.arange(row, row + rows) // high].view(grid.dtype)
        by_row = grid.float()
        return by_row if by_row.shape[1] == 1 else by_row.repeat_interleave(wide, 1)[:, :columns]

    def decode_rows(self, codes: Tensor, row: int, dtype: torch.dtype) -> Tensor:
        """Values of `codes` `[n, columns]`, which are rows `[row, row + n)` of the tensor."""
        return numerics.decode(codes, self.scales(row, *codes.shape), dtype)


def _bits(dtype: torch.dtype) -> torch.dtype:
    """What torch can index where it cannot index E8M0."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


def grid_shape(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """Of the scales of a tensor `[rows, columns]`."""
    return -(-rows // block[0]), -(-columns // block[1])
