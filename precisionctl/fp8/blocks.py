"""BlockScales: a first pass over a tensor finds the scales of its blocks, so that a second one can encode it.

A block keeps its carried scale if encoding and decoding with it gives back every value: the values were decoded from
such codes and have not changed, so the same codes come out again. Otherwise the block gets a new scale from its amax.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from precisionctl.fp8 import numerics
from precisionctl.fp8.encoding import Encoding, grid_shape


class BlockScales:
    """The scales of a tensor `[rows, columns]` in blocks of `block` (rows, columns), for codes of `dtype`: give it all
    rows (`see`), then take its `encoding`.

    `carried` is the encoding that the values had before, in blocks of any size; None if unknown. One number for each
    block, `[block rows, block columns]`: `amax`, FP32, the largest magnitude so far; `candidate`, FP32, the carried
    scale_inv, NaN or 0 where there is none; `fits`, bool, whether every value so far is exactly a code times
    `candidate`.
    """

    def __init__(
        self, rows: int, columns: int, block: tuple[int, int], dtype: torch.dtype, carried: Encoding | None
    ) -> None:
        self.block, self.dtype, self.carried = block, dtype, carried
        self.amax = torch.zeros(grid_shape(rows, columns, block))
        self.candidate = carried.in_blocks(rows, columns, block) if carried else torch.zeros_like(self.amax)
        self.fits = torch.isfinite(self.candidate) & (self.candidate > 0)
        self.has_nan = False
        """Whether any value so far is NaN."""

    def see(self, values: Tensor, row: int, scratch: Tensor | None = None) -> None:
        """Take rows `[row, row + n)` into account: `values` `[n, columns]`, in the dtype that they are stored in.
        `scratch` is as for `numerics.row_amax`."""
        work = numerics.scratch_for(values) if scratch is None else scratch
        high = self.block[0]
        here = slice(row // high, -(-(row + len(values)) // high))  # only these rows of the grid, which may be large
        row -= here.start * high
        if self.amax.numel() == 1:
            amax, has_nan = numerics.amax_and_nan(values)
            self.amax = torch.maximum(self.amax, amax)
            self.has_nan |= has_nan
        else:
            self._reduce(self.amax[here], values, row, work)
        if self.carried is None:
            return
        # A value fits if its code decodes to it, in its own dtype or rounded to BF16: values that passed through BF16
        # fit in BF16, whatever dtype they are stored in now. Infinity never fits, as its code is that of fp8_max.
        misfit = torch.zeros_like(self.amax[here])  # 1 in blocks where some value does not fit
        grid = self.candidate[here]
        encoding = Encoding(self.dtype, torch.where(grid.isfinite() & (grid > 0), grid, 1.0), self.block)
        codes = encoding.encode_rows(values, row, scratch=work)
        back = encoding.decode_rows(codes, row, scratch=work)
        same = (back.to(values.dtype) == values) | (back.bfloat16() == values) | (back.isnan() & values.isnan())
        self._reduce(misfit, (~same | values.isinf()).float(), row, work)
        self.fits[here] &= misfit == 0

    def changed(self, values: Tensor, codes: Tensor, row: int) -> int:
        """How many `codes` of `values`, rows from `row` on, differ from those that the carried scales give."""
        assert self.carried is not None
        before = self.carried.encode_rows(values, row)
        return int((before.view(torch.uint8) != codes.view(torch.uint8)).sum())

    def _reduce(self, into: Tensor, values: Tensor, row: int, scratch: Tensor) -> None:
        """Update `into` with the largest magnitude of each block; NaN is ignored."""
        high, wide = self.block
        ragged = -values.shape[1] % wide
        blocks = torch.nn.functional.pad(values, (0, ragged)) if ragged else values
        amax, has_nan = numerics.row_amax_and_nan(blocks.reshape(-1, wide), scratch)
        self.has_nan |= has_nan
        by_row = amax.view(len(values), -1)
        if high == 1:
            into[row : row + len(values)] = by_row
            return
        for block in range(row // high, -(-(row + len(values)) // high)):
            first, last = max(block * high - row, 0), (block + 1) * high - row
            into[block] = torch.maximum(into[block], by_row[first:last].amax(0))

    def encoding(self, dtype: torch.dtype, numbers: numerics.Numbers = "FP32") -> Encoding:
        """The encoding to use, with scales stored in `dtype`: carried scales where they fit and `dtype` represents
        them exactly, elsewhere new ones rounded up to `numbers`."""
        self.fits &= self.candidate.to(dtype).float() == self.candidate
        asked = "powers of 2" if dtype.itemsize == 1 else numbers
        new = numerics.rounded_up(numerics.scale_inv(self.amax, self.dtype), asked)
        grid = torch.where(self.fits, self.candidate, new.to(dtype).float())
        return Encoding(self.dtype, grid.to(dtype), self.block)


def share(tensors: Sequence[BlockScales]) -> None:
    """Give several tensors, each a single block, a common scale: the carried one if it is the same and fits all."""
    amax = torch.stack([tensor.amax for tensor in tensors]).amax(0)
    same = all(torch.equal(tensor.candidate, tensors[0].candidate) for tensor in tensors)
    fits = torch.stack([tensor.fits for tensor in tensors]).all(0) & same
    for tensor in tensors:
        tensor.amax, tensor.fits = amax, fits
