"""Encoding: how stored codes were made, so that they can be read and made again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precisionctl.codes import integers, nibbles, numerics
from precisionctl.codes.elements import Element
from precisionctl.dtypes import DType
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GlobalScale:
    """A second scale, FP32 `[]`, for a whole tensor. The scales of blocks are multiplied by it or, if it `divides`,
    divided by it, in FP32."""

    value: Tensor
    divides: bool

    def times(self, stored: Tensor) -> Tensor:
        """The multipliers of codes, FP32, from a grid of blocks' scales as they are stored; rounded once, as ModelOpt
        and compressed-tensors do before they multiply with the code."""
        grid = _in_fp32(stored)
        return grid / self.value if self.divides else grid * self.value

    def same(self, other: GlobalScale | None) -> bool:
        """Whether two global scales have the same direction and the same bits."""
        return other is not None and self.divides == other.divides and torch.equal(self.value, other.value)


@dataclass(frozen=True)
class Encoding:
    """An element and a grid of dequantize multipliers: element (i, j) of a tensor seen as `[rows, columns]` is
    `code * scale_inv[i // block[0], j // block[1]]`, multiplied in FP32.

    `scale_inv` is `[ceil(rows / block[0]), ceil(columns / block[1])]`, in the dtype that it is stored in. One scale
    for a tensor is a block of all of it, one for each output channel a block of one row. Ragged edges are blocks
    that are cut off: DeepSeek's 576 rows have 5 rows of scales, the last for 64 of them. `global_scale` is applied to
    the scales first, where there is one; `zeros`, FP32 of `scale_inv`'s shape, are taken from codes first.
    """

    element: Element
    scale_inv: Tensor
    block: tuple[int, int]
    global_scale: GlobalScale | None = None
    zeros: Tensor | None = None

    @property
    def global_divides(self) -> bool | None:
        """Whether the global scale divides the scales of blocks or multiplies them; None without a global scale."""
        return self.global_scale.divides if self.global_scale else None

    @property
    def multipliers(self) -> Tensor:
        """The FP32 grid by which codes are multiplied, with the global scale included."""
        return self.global_scale.times(self.scale_inv) if self.global_scale else _in_fp32(self.scale_inv)

    def same(self, other: Encoding) -> bool:
        """Whether two encodings are equal, apart from the dtype in which scales are stored."""
        mine, others = self.global_scale, other.global_scale
        same_global = mine is others or (mine is not None and mine.same(others))
        zeros = [each.zeros for each in (self, other) if each.zeros is not None]
        same_zeros = not zeros or (len(zeros) == 2 and torch.equal(*zeros))
        same_kind = (self.element, self.block) == (other.element, other.block) and same_global and same_zeros
        return same_kind and torch.equal(self.scale_inv.float(), other.scale_inv.float())

    def of_rows(self, row: int, rows: int) -> Encoding:
        """The encoding of rows `[row, row + rows)` alone, with scales of their own and no global one."""
        scales, zeros = self._scales_and_zeros(row, rows)
        return Encoding(self.element, scales, (1, self.block[1]), zeros=zeros)

    def scales(self, row: int, rows: int, columns: int) -> Tensor:
        """FP32 scale_inv of each element of rows `[row, row + rows)`: `[rows, columns]`, or `[rows, 1]` or `[1, 1]`
        where that says the same."""
        grid = self._grid(row, rows)
        return grid if grid.shape[1] == 1 else grid.repeat_interleave(self.block[1], 1)[:, :columns]

    def decode_rows(self, codes: Tensor, row: int, into: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        """FP32 values `[n, columns]` of `codes`, which are rows `[row, row + n)` of the tensor: `[n, columns]`, of four
        bits `[n, columns / 2]`. `into` is contiguous, `scratch` as `numerics.decode_by_scale_inv` takes it."""
        values = torch.empty(len(codes), codes.shape[1] * 8 // self.element.bits) if into is None else into
        work = numerics.scratch_for(codes) if scratch is None else scratch
        if self.element.bits == 4:
            scales, zeros = self._scales_and_zeros(row, len(values))
            nibbles.decode(codes, self.element, scales, values, work, zeros)
            return values
        if self.element.is_integer:
            scales, zeros = self._scales_and_zeros(row, len(values))
            integers.decode(codes, scales, zeros, values)
            return values
        shape, scales = self._scaled(row, *codes.shape)
        numerics.decode_by_scale_inv(codes.reshape(shape), scales, values.view(shape), work)
        return values

    def encode_rows(
        self, values: Tensor, row: int, into: Tensor | None = None, scratch: Tensor | None = None
    ) -> Tensor:
        """Codes of `values` `[n, columns]`, which are rows `[row, row + n)` of the tensor, as `decode_rows` takes them;
        `into` is contiguous, `scratch` as `numerics.encode_by_scale_inv` takes it."""
        rows, columns = values.shape
        dtype = self.element.dtype.torch
        codes = torch.empty(rows, columns * self.element.bits // 8, dtype=dtype) if into is None else into
        work = numerics.scratch_for(values) if scratch is None else scratch
        if self.element.bits == 4:
            scales, zeros = self._scales_and_zeros(row, rows)
            nibbles.encode(values, self.element, scales, codes, work, zeros)
            return codes
        if self.element.is_integer:
            scales, zeros = self._scales_and_zeros(row, rows)
            integers.encode(values, scales, zeros, codes, work)
            return codes
        shape, scales = self._scaled(row, *values.shape)
        numerics.encode_by_scale_inv(values.reshape(shape), scales, codes.view(shape), work)
        return codes

    def _scales_and_zeros(self, row: int, rows: int) -> tuple[Tensor, Tensor | None]:
        """Of rows `[row, row + rows)`, the scales and the zero points of the groups in each: FP32 `[rows, groups]`."""
        zeros = None if self.zeros is None else self._rows_of(self.zeros, row, rows).expand(rows, -1)
        return self._grid(row, rows).expand(rows, -1), zeros

    def _grid(self, row: int, rows: int) -> Tensor:
        """FP32 scale_inv of the blocks in each row, `[rows, blocks]`, or `[1, blocks]` where all rows are alike."""
        stored = self._rows_of(self.scale_inv, row, rows)
        return self.global_scale.times(stored) if self.global_scale else _in_fp32(stored)

    def _rows_of(self, grid: Tensor, row: int, rows: int) -> Tensor:
        """For each of these rows, the row of the grid that is for it: `[rows, blocks]`; all of a grid of one row."""
        if len(grid) == 1:
            return grid
        if self.block[0] == 1:
            return grid[row : row + rows]
        stored = grid.view(torch.uint8) if grid.dtype.itemsize == 1 else grid  # torch cannot index E8M0
        return stored[torch.arange(row, row + rows) // self.block[0]].view(grid.dtype)

    def _scaled(self, row: int, rows: int, columns: int) -> tuple[tuple[int, int], Tensor]:
        """A shape for rows `[row, row + rows)` in which each row has one scale, and these scales, `[n, 1]`. If the last
        block of a row is cut off, there is no such shape: then each element has its own scale, which costs four bytes
        to read."""
        grid, wide = self._grid(row, rows), self.block[1]
        if grid.shape[1] == 1 or columns % wide:
            return (rows, columns), self.scales(row, rows, columns)
        return (rows * grid.shape[1], wide), grid.expand(rows, -1).reshape(-1, 1)

    def in_blocks(self, rows: int, columns: int, block: tuple[int, int]) -> Tensor:
        """The FP32 multiplier of each block of another size, of a tensor `[rows, columns]`; NaN where one block would
        have several."""
        high, wide = grid_shape(rows, columns, block)
        by_block = _regrouped(self.multipliers, self.block[0], block[0], high)
        return _regrouped(by_block.t(), self.block[1], block[1], wide).t()


def _in_fp32(grid: Tensor) -> Tensor:
    """Stored scales in FP32."""
    return numerics.code_values(grid) if grid.dtype == torch.float8_e4m3fn else grid.float()


def _regrouped(grid: Tensor, here: int, there: int, count: int) -> Tensor:
    """Regroup the rows of a grid, each of which stands for `here` rows of a tensor, into `count` rows that stand for
    `there` rows each. NaN where one new row would have several values, and where neither of `here` and `there` is a
    multiple of the other."""
    if len(grid) == 1:
        return grid.expand(count, -1)
    if here % there == 0:
        return grid.repeat_interleave(here // there, 0)[:count]
    if there % here and count > 1:
        return torch.full((count, grid.shape[1]), torch.nan)
    each = len(grid) if count == 1 else there // here
    parts = grid[torch.arange(count * each).clamp(max=len(grid) - 1)].view(count, each, -1)
    return torch.where(parts.amin(1) == parts.amax(1), parts.amax(1), torch.nan)


def joined(parts: Sequence[Encoding], columns: int) -> Encoding:
    """The encoding of rows that are stored below each other, from those of its parts (`Encoding.of_rows`), which are
    codes of one element. Where some of them alone have zero points, those of the others are 0."""
    if len(parts) == 1:
        return parts[0]
    wide = parts[0].block[1] if len({part.block for part in parts}) == 1 else 1
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = [torch.zeros_like(part.scale_inv) if part.zeros is None else part.zeros for part in parts]

    def below_each_other(grids: Sequence[Tensor]) -> Tensor:
        if wide > 1:
            return torch.cat([*grids])
        cells = (grid.repeat_interleave(part.block[1], 1)[:, :columns] for grid, part in zip(grids, parts, strict=True))
        return torch.cat([*cells])

    grid = below_each_other([part.scale_inv for part in parts])
    return Encoding(parts[0].element, grid, (1, wide), zeros=None if zeros is None else below_each_other(zeros))


def by_rows(encoding: Encoding, rows: int) -> Tensor:
    """FP32 scale_inv of each row of a tensor, `[rows, columns / block[1]]`, which can be moved like the rows
    themselves."""
    grid = encoding.multipliers
    return grid[torch.arange(rows) // encoding.block[0]] if len(grid) > 1 else grid.expand(rows, -1)


def from_rows(grid: Tensor, like: Encoding, columns: int) -> Encoding:
    """The inverse of `by_rows`, after rows of codes of `like` have moved. Tries one scale for the tensor, then blocks
    of the old size, then blocks of one row, which are needed if rows of different blocks are now in one block."""
    assert like.zeros is None, "zero points are not moved"
    rows, wide = len(grid), columns if grid.shape[1] == 1 else like.block[1]
    dtype = like.scale_inv.dtype if like.global_scale is None else torch.float32
    for high in (rows, like.block[0], 1):
        made = _regrouped(grid, 1, high, -(-rows // high))
        if not bool(made.isnan().any()):
            return Encoding(like.element, made.to(dtype), (high, wide))
    raise AssertionError("a row of its own has one scale")


def scale_dtype(stored: DType) -> DType:
    """The dtype of the scales in a tensor that is `stored` in this dtype: bytes are exponents (E8M0)."""
    return DType.float8_e8m0fnu if stored == DType.uint8 else stored


def grid_shape(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """The shape of the grid of scales of a tensor `[rows, columns]`."""
    return -(-rows // block[0]), -(-columns // block[1])
