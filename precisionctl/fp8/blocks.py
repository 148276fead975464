"""BlockScales: one pass over a tensor finds the scales of its blocks, so that a second one can encode it.

A carried scale is kept where it gives back every value of its block: then the values are codes of old, and are the
same codes again. Elsewhere they have changed since, and the block gets the scale that its amax asks for.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from precisionctl.fp8 import numerics
from precisionctl.fp8.encoding import Encoding, grid_shape


class BlockScales:
    """The scales of a tensor `[rows, columns]` in blocks of a size, for codes of a dtype: show it all rows (`see`),
    then take its `encoding`.

    `carried` is how its values were coded before, in blocks of any size; None where that is not known. By block, all
    FP32 but the last: `amax`, the largest magnitude seen; `candidate`, the carried scale_inv, NaN or 0 where there is
    none; and `fits`, whether every value seen is a code's under it.
    """

    def __init__(
        self, rows: int, columns: int, block: tuple[int, int], dtype: torch.dtype, carried: Encoding | None
    ) -> None:
        self.block, self.dtype, self.carried = block, dtype, carried
        self.amax = torch.zeros(grid_shape(rows, columns, block))
        self.candidate = carried.in_blocks(rows, columns, block) if carried else torch.zeros_like(self.amax)
        self.fits = torch.isfinite(self.candidate) & (self.candidate > 0)
        self.has_nan = False
        """Whether there is one among the values so far."""

    def see(self, values: Tensor, row: int, scratch: Tensor | None = None) -> None:
        """`values` `[n, columns]` are rows `[row, row + n)`, in the dtype that they are stored in; `scratch` as
        `numerics.row_amax` takes it."""
        work = numerics.scratch_for(values) if scratch is None else scratch
        high = self.block[0]
        here = slice(row // high, -(-(row + len(values)) // high))  # of the grid, which may be large
        row -= here.start * high
        if self.amax.numel() == 1:
            amax, has_nan = numerics.amax_and_nan(values)
            self.amax = torch.maximum(self.amax, amax)
            self.has_nan |= has_nan
        else:
            self._reduce(self.amax[here], values, row, work)
        if self.carried is None:
            return
        misfit = torch.zeros_like(self.amax[here])
        # 1 where a value is no code's under an encoding, FP32. A value that has been BF16 once is one that is a
        # code's in BF16, whatever it is stored in now. Infinity tells nothing of its code
        grid = self.candidate[here]
        encoding = Encoding(self.dtype, torch.where(grid.isfinite() & (grid > 0), grid, 1.0), self.block)
        codes = encoding.encode_rows(values, row, scratch=work)
        back = encoding.decode_rows(codes, row, scratch=work)
        same = (back.to(values.dtype) == values) | (back.bfloat16() == values) | (back.isnan() & values.isnan())
        self._reduce(misfit, (~same | values.isinf()).float(), row, work)
        self.fits[here] &= misfit == 0

    def changed(self, values: Tensor, codes: Tensor, row: int) -> int:
        """How many of the codes that were made are other than under the scales that were carried."""
        assert self.carried is not None
        before = self.carried.encode_rows(values, row)
        return int((before.view(torch.uint8) != codes.view(torch.uint8)).sum())

    def _reduce(self, into: Tensor, values: Tensor, row: int, scratch: Tensor) -> None:
        """Largest magnitude by block; NaN is passed over."""
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
        """The scales to encode with, stored in `dtype`: those that fit, and new ones, rounded up to these `numbers`.
        What `dtype` cannot hold does not fit either."""
        self.fits &= self.candidate.to(dtype).float() == self.candidate
        asked = "powers of 2" if dtype.itemsize == 1 else numbers
        new = numerics.rounded_up(numerics.scale_inv(self.amax, self.dtype), asked)
        grid = torch.where(self.fits, self.candidate, new.to(dtype).float())
        return Encoding(self.dtype, grid.to(dtype), self.block)


def share(tensors: Sequence[BlockScales]) -> None:
    """Make one scale of those of several tensors, each a block of its own: the carried one where it fits all."""
    amax = torch.stack([tensor.amax for tensor in tensors]).amax(0)
    same = all(torch.equal(tensor.candidate, tensors[0].candidate) for tensor in tensors)
    fits = torch.stack([tensor.fits for tensor in tensors]).all(0) & same
    for tensor in tensors:
        tensor.amax, tensor.fits = amax, fits
