"""BlockScales: a first pass over a tensor finds the scales of its blocks, so that a second one can encode it.

A block keeps its former scale if encoding and decoding with it gives back every value: the values were decoded from
such codes and have not changed, so the same codes come out again. Otherwise the block gets a new scale from its amax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from precisionctl.codes import group_scales, numerics
from precisionctl.codes.elements import E2M1, INT4, Element
from precisionctl.codes.encoding import Encoding, GlobalScale, grid_shape
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor


class BlockScales:
    """Finds the scales of a tensor `[rows, columns]` in blocks, for codes of an element: show it all rows (`see`), let
    tensors that share a scale agree on it (`share`, `share_global`), and `settle` which one each block gets.

    `former` is how the values were encoded before, in blocks of any size; None if that is not known. `divides` is None
    if blocks have no global scale, else whether the global scale is stored as a divisor.

    For each block it keeps, in FP32: `amax`, the largest magnitude seen, and `candidate`, the former scale_inv (NaN or
    0 if there is none). `fits`, bool, says whether every value seen is the value of a code under the candidate.
    Where there are zero points, also `below_zero` and `above_zero`, the largest magnitudes on either side of zero.
    `exact` says, where there are zero points, whether every value that fits is its code's to the last bit, and none is
    that value rounded to BF16.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        block: tuple[int, int],
        element: Element,
        former: Encoding | None,
        divides: bool | None = None,
        zero_points: bool = False,
    ) -> None:
        self.block, self.element, self.former, self.divides = block, element, former, divides
        shape = grid_shape(rows, columns, block)
        self.amax = torch.zeros(shape)
        self.below_zero = torch.zeros(shape) if zero_points else None
        self.above_zero = torch.zeros(shape) if zero_points else None
        self.candidate, self.zeros = torch.zeros(shape), torch.zeros(shape) if zero_points else None
        self.global_scale: GlobalScale | None = None
        self._as_before = (
            former is not None
            and (former.block, former.element) == (block, element)
            and (former.global_divides, former.zeros is not None) == (divides, zero_points)
        )
        if former and self._as_before:
            self.candidate, self.zeros = former.scale_inv.float(), former.zeros
            self.global_scale = former.global_scale
        elif former and former.zeros is None and divides is None and not zero_points:
            self.candidate = former.in_blocks(rows, columns, block)
        self.fits = torch.zeros(shape, dtype=torch.bool) if former is None else _usable(self.candidate)
        self.exact = True
        self.has_nan = False
        """Whether any value so far is NaN."""

    def see(self, values: Tensor, row: int, scratch: Tensor | None = None) -> None:
        """Take rows `[row, row + n)` into account: `values` `[n, columns]`, in the dtype that they are stored in.
        `scratch` is as for `numerics.row_amax`."""
        work = numerics.scratch_for(values) if scratch is None else scratch
        high = self.block[0]
        here = slice(row // high, -(-(row + len(values)) // high))  # only these rows of the grid, which may be large
        first = row - here.start * high  # the number of the first row in these blocks
        if self.amax.numel() == 1:
            amax, has_nan = numerics.amax_and_nan(values)
            self.amax = torch.maximum(self.amax, amax)
            self.has_nan |= has_nan
        else:
            self._reduce(self.amax[here], values, first, work)
        if self.below_zero is not None and self.above_zero is not None:
            self._reduce(self.above_zero[here], values.clamp(min=0), first, work)
            self._reduce(self.below_zero[here], values.clamp(max=0), first, work)
        if self.former is None:
            return
        # A value fits if its code decodes to it, in its own dtype or rounded to BF16: values that passed through BF16
        # fit in BF16, whatever dtype they are stored in now. Infinity never fits, as its code is that of fp8_max.
        misfit = torch.zeros_like(self.amax[here])  # 1 in blocks where some value does not fit
        grid = self.candidate[here]
        usable = torch.where(_usable(grid), grid, 1.0)
        zeros = None if self.zeros is None else self.zeros[here]
        encoding = Encoding(self.element, usable, self.block, self.global_scale, zeros)
        codes = encoding.encode_rows(values, first, scratch=work)
        back = encoding.decode_rows(codes, first, scratch=work)
        same = (back.to(values.dtype) == values) | (back.bfloat16() == values) | (back.isnan() & values.isnan())
        if zeros is not None:
            self.exact &= bool(((back == values) | ~same).all())
        self._reduce(misfit, (~same | values.isinf()).float(), first, work)
        self.fits[here] &= misfit == 0

    def _reduce(self, into: Tensor, values: Tensor, row: int, scratch: Tensor) -> None:
        """Update `into`, rows of the grid, with the largest magnitude of each block; `row` is the number of the first
        of these `values` in them. NaN is ignored."""
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

    def settle(self, dtype: torch.dtype, rounding: numerics.ScaleRounding) -> Encoding:
        """Decide which former scales fit and, if that is needed, on a new global scale. Returns the scales to encode
        with, stored in `dtype`: those that fit, and new ones. New ones of FP8 are rounded up as `rounding` says, those
        of INT8 the nearest; those of four bits are made as in `codes/group_scales.py`, or, where it `searches`, left to
        `searched`. What `dtype` cannot hold does not fit either."""
        if self.former is not None:
            self.fits &= self.candidate.to(dtype).float() == self.candidate
        if self.divides is not None and self.needs_new_global:
            self.take_global(self.amax.amax())
        if self.below_zero is not None and self.above_zero is not None and self.zeros is not None:
            return self._with_zero_points(dtype, self.below_zero, self.above_zero, self.zeros)
        if self.divides is not None or self.element == INT4:
            new = self.candidate  # all former scales fit, or `searched` replaces those that do not
        elif self.element == E2M1:
            new = group_scales.mxfp4_scales(self.amax)
        else:
            new = numerics.scale_inv(self.amax, self.element)
            if dtype.itemsize == 1:
                new = numerics.rounded_up(new, "powers of 2")
            else:
                new = numerics.rounded_up(new.clamp(min=numerics.SMALLEST_SCALE), rounding)
        return Encoding(self.element, self._kept_or(new, dtype), self.block, self.global_scale)

    @property
    def needs_new_global(self) -> bool:
        """Whether blocks that have changed need scales that E4M3 does not hold under the former global scale, or there
        is none. If all values have become smaller, it stays: that costs some of E4M3's range, but unchanged blocks keep
        their codes."""
        if self.global_scale is None:
            return True
        wanted = self.amax / group_scales.NVFP4_LARGEST
        return bool((~self.fits & (wanted > self.global_scale.times(torch.ones(())))).any())

    def take_global(self, amax: Tensor) -> None:
        """Make a new global scale of an amax, of this tensor or of all that share it: then no former scale fits."""
        assert self.divides is not None
        value = group_scales.nvfp4_global(amax, divisor=self.divides)
        self.global_scale = GlobalScale(value, self.divides)
        self.fits.fill_(False)

    def _with_zero_points(self, dtype: torch.dtype, below: Tensor, above: Tensor, zeros: Tensor) -> Encoding:
        """compressed-tensors' rule (`calculate_qparams`): `scale = (above + below) / (last - first)` and `zero_point =
        below / scale + first`, so that as many steps as there are, of INT4 fifteen, go from the lowest value, or 0, to
        the highest."""
        first, last = -self.element.largest - 1, self.element.largest
        wanted = (below + above) / (last - first)
        new = torch.where(wanted > 0, _stored(wanted, dtype).float(), 1.0)
        grid = torch.where(self.fits, self.candidate, new)
        new_zeros = (below / new + first).round().clamp(first, last)
        return Encoding(self.element, grid.to(dtype), self.block, zeros=torch.where(self.fits, zeros, new_zeros))

    @property
    def searches(self) -> bool:
        """Whether new scales are the best of several candidates. That takes a second look at the values: see
        `searched`."""
        return (self.divides is not None or self.element == INT4) and self.zeros is None and not bool(self.fits.all())

    def searched(self, values: Tensor, row: int, whole: Encoding, scratch: Tensor) -> Encoding:
        """The encoding of rows `[row, row + n)`, with scales searched for their `values` (FP32). `whole` is the
        tensor's, by `settle`; `scratch` is as `nibbles.encode` takes it."""
        here = slice(row, row + len(values))
        amax = self.amax[here]
        if self.global_scale is None:
            found = group_scales.int4_scales_of(values, amax, scratch)
        else:
            found = group_scales.nvfp4_scales_of(
                values, amax, self.global_scale.value, scratch, divisor=self.global_scale.divides
            )
        return replace(whole, scale_inv=self._kept_or(found, whole.scale_inv.dtype, here))

    def _kept_or(self, new: Tensor, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """These rows of the grid, in the dtype that is stored: the former scale where it fits, else the new one."""
        stored = _stored(new, dtype)
        if self.former is None:
            return stored
        return torch.where(self.fits[rows], self.candidate[rows], stored.float()).to(dtype)

    def changed(self, values: Tensor, codes: Tensor, row: int, made: Encoding) -> int:
        """How many of the `codes` of rows from `row` on differ from those under the former scales. Between two formats
        of which one is not FP8, codes cannot be compared: then, how many values the codes do not represent exactly, as
        `made`, the encoding of these rows alone, decodes them."""
        before = self.former
        assert before is not None
        if not self._as_before and not (before.element.is_fp8 and self.element.is_fp8):
            return int((made.decode_rows(codes, 0).to(values.dtype) != values).sum())
        return self.element.differing(before.encode_rows(values, row), codes)


def _stored(new: Tensor, dtype: torch.dtype) -> Tensor:
    """New scales in the dtype that is stored. In FP16 one below 2^-25 would be zero and one from 65520 on infinite, and
    codes then NaN: these become its smallest and largest numbers."""
    limits = torch.finfo(dtype)
    return new.float().clamp(limits.smallest_normal * limits.eps, limits.max).to(dtype)


def _usable(grid: Tensor) -> Tensor:
    """Which scales are positive, finite numbers, bool of the grid's shape."""
    return (grid > 0) & (grid < torch.inf)


def share(tensors: Sequence[BlockScales]) -> None:
    """Give several tensors, each a single block, a common scale: the former one if it is the same and fits all."""
    amax = torch.stack([tensor.amax for tensor in tensors]).amax(0)
    same = all(torch.equal(tensor.candidate, tensors[0].candidate) for tensor in tensors)
    fits = torch.stack([tensor.fits for tensor in tensors]).all(0) & same
    for tensor in tensors:
        tensor.amax, tensor.fits = amax, fits


def share_global(tensors: Sequence[BlockScales], *, always: bool) -> None:
    """Give tensors that engines compute as one a common new global scale, if any of them needs a new one. If their
    global scales differ, somebody chose that, and they keep them unless they must `always` share one."""
    if len(tensors) < 2:
        return
    first = tensors[0].global_scale
    alike = all(first is other.global_scale or (first and first.same(other.global_scale)) for other in tensors)
    if always and not alike or alike and any(tensor.needs_new_global for tensor in tensors):
        largest = torch.stack([tensor.amax.amax() for tensor in tensors]).amax()
        for tensor in tensors:
            tensor.take_global(largest)
