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
        grid = self._grid(row, rows)
        return grid if grid.shape[1] == 1 else grid.repeat_interleave(self.block[1], 1)[:, :columns]

    def decode_rows(self, codes: Tensor, row: int, into: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        """FP32 values of `codes` `[n, columns]`, which are rows `[row, row + n)` of the tensor; `into` is contiguous,
        `scratch` as `numerics.decode_by_scale_inv` takes it."""
        values = torch.empty(codes.shape) if into is None else into
        work = numerics.scratch_for(codes) if scratch is None else scratch
        shape, scales = self._scaled(row, *codes.shape)
        numerics.decode_by_scale_inv(codes.reshape(shape), scales, values.view(shape), work)
        return values

    def encode_rows(
        self, values: Tensor, row: int, into: Tensor | None = None, scratch: Tensor | None = None
    ) -> Tensor:
        """Codes of `values` `[n, columns]`, which are rows `[row, row + n)` of the tensor; `into` is contiguous,
        `scratch` as `numerics.encode_by_scale_inv` takes it."""
        codes = torch.empty(values.shape, dtype=self.dtype) if into is None else into
        work = numerics.scratch_for(values) if scratch is None else scratch
        shape, scales = self._scaled(row, *values.shape)
        numerics.encode_by_scale_inv(values.reshape(shape), scales, codes.view(shape), work)
        return codes

    def _grid(self, row: int, rows: int) -> Tensor:
        """FP32 scale_inv of the blocks in each row, `[rows, blocks]`, or `[1, blocks]` where all rows are alike."""
        grid = self.scale_inv
        if len(grid) > 1:
            stored = grid.view(torch.uint8) if grid.dtype.itemsize == 1 else grid  # torch cannot index E8M0
            grid = stored[torch.arange(row, row + rows) // self.block[0]].view(grid.dtype)
        return grid.float()

    def _scaled(self, row: int, rows: int, columns: int) -> tuple[tuple[int, int], Tensor]:
        """A shape for rows `[row, row + rows)` in which each row has one scale, and those scales, `[n, 1]`; where the
        last block of a row is cut off there is none, and each element has its own, which is four bytes to read."""
        grid, wide = self._grid(row, rows), self.block[1]
        if grid.shape[1] == 1 or columns % wide:
            return (rows, columns), self.scales(row, rows, columns)
        return (rows * grid.shape[1], wide), grid.expand(rows, -1).reshape(-1, 1)

    def in_blocks(self, rows: int, columns: int, block: tuple[int, int]) -> Tensor:
        """The FP32 scale_inv of each block of another size, of a tensor `[rows, columns]`; NaN where one block would
        have several."""
        high, wide = grid_shape(rows, columns, block)
        by_block = _regrouped(self.scale_inv.float(), self.block[0], block[0], high)
        return _regrouped(by_block.t(), self.block[1], block[1], wide).t()


def _regrouped(grid: Tensor, here: int, there: int, count: int) -> Tensor:
    """Rows that each stand for `here` rows of a tensor, as `count` ones that stand for `there`; NaN where they differ,
    and where the one is no multiple of the other."""
    if here == there and len(grid) == count:
        return grid
    if len(grid) == 1:
        return grid.expand(count, -1)
    if here % there == 0:
        return grid.repeat_interleave(here // there, 0)[:count]
    if there % here and count > 1:
        return torch.full((count, grid.shape[1]), torch.nan)
    each = len(grid) if count == 1 else there // here
    parts = grid[torch.arange(count * each).clamp(max=len(grid) - 1)].view(count, each, -1)
    return torch.where(parts.amin(1) == parts.amax(1), parts.amax(1), torch.nan)


def by_rows(encoding: Encoding, rows: int) -> Tensor:
    """FP32 scale_inv of each row of a tensor, `[rows, columns / block[1]]`: to be moved as its rows are."""
    grid = encoding.scale_inv.float()
    return grid[torch.arange(rows) // encoding.block[0]] if len(grid) > 1 else grid.expand(rows, -1)


def of_rows(dtype: torch.dtype, grid: Tensor, like: Encoding, columns: int) -> Encoding:
    """The inverse of `by_rows`, after rows have moved: one scale for a tensor, else blocks of `like`'s size, else
    of one row each, where rows of several blocks have come into one."""
    rows, wide = len(grid), columns if grid.shape[1] == 1 else like.block[1]
    for high in (rows, like.block[0], 1):
        made = _regrouped(grid, 1, high, -(-rows // high))
        if not bool(made.isnan().any()):
            return Encoding(dtype, made.to(like.scale_inv.dtype), (high, wide))
    raise AssertionError("a row of its own has one scale")


def grid_shape(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """Of the scales of a tensor `[rows, columns]`."""
    return -(-rows // block[0]), -(-columns // block[1])
