"""How far the values of one tensor are from those of another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from precisionctl.codes import numerics
from precisionctl.codes.statistics import decibels
from precisionctl.torch_when_used import torch
from precisionctl.verify.hf_tensors import StoredRows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Differences:
    """B's values against A's, shown piece by piece: sums of squares of A's values and of what B's are off, the largest
    absolute error, how many values there are and differ, and how many are 0 on one side alone. Sums and errors are of
    what is `measurable`."""

    signal: float = 0.0
    noise: float = 0.0
    largest_error: float = 0.0
    elements: int = 0
    differing: int = 0
    zeroed: int = 0

    def see(self, a: StoredRows, b: StoredRows) -> None:
        """The same rows of both."""
        left, right = comparable(a, b)
        self.elements += left.numel()
        self.differing += differing(left, right)
        left, right = measurable(left, right)
        self.zeroed += int(np.count_nonzero((left.numpy() == 0) != (right.numpy() == 0)))
        signal = left.double().view(-1)
        error = difference(signal, right.double().view(-1))
        least, most = map(float, error.aminmax())
        self.signal += float(signal.dot(signal))  # no further copies
        self.noise += float(error.dot(error))
        self.largest_error = max(self.largest_error, -least, most)

    @property
    def sqnr_db(self) -> float:
        """`10 log10(sum a^2 / sum (a - b)^2)`."""
        return decibels(self.signal, self.noise)


def comparable(a: StoredRows, b: StoredRows) -> tuple[Tensor, Tensor]:
    """The values of the same rows of both, in a dtype in which no two of them become one: FP32 `[n, columns]`; FP64 if
    one side is stored in that; FP64 `[n, columns, 2]` if one has complex numbers, or integers, each of which is its
    rounding to FP64 and what that leaves."""
    left, right = (rows.stored if rows.encoding is None else rows.values for rows in (a, b))
    if all(each.is_floating_point() for each in (left, right)):
        dtype = torch.float64 if torch.float64 in (left.dtype, right.dtype) else torch.float32
        return left.to(dtype), right.to(dtype)
    return _in_two(left), _in_two(right)


def _in_two(stored: Tensor) -> Tensor:
    if stored.is_complex():
        return torch.view_as_real(stored.to(torch.complex128))
    rounded = stored.double()
    if stored.is_floating_point():
        return torch.stack([rounded, torch.zeros_like(rounded)], -1)
    rest = stored.to(torch.int64) - rounded.to(torch.int64)  # at most 1024, but where a uint64 is negative there
    return torch.stack([rounded, ((rest + 2048 & 4095) - 2048).double()], -1)


def differing(a: Tensor, b: Tensor) -> int:
    """The number of values that differ, as `comparable` returns them: +0 and -0 differ, two NaNs do not."""
    bits = torch.int32 if a.dtype == torch.float32 else torch.int64
    other = a.view(bits).numpy() != b.view(bits).numpy()
    if numerics.has_nan(a) and numerics.has_nan(b):
        other &= ~(a.isnan() & b.isnan()).numpy()
    return int(np.count_nonzero(other.any(-1) if a.dim() == 3 else other))


def measurable(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both, with 0 where both are NaN or the same infinity: nothing is lost there, and sums of squares are of the
    other values."""
    if numerics.are_finite(a):
        return a, b
    same = (a.isnan() & b.isnan()) | (a.isinf() & (a == b))
    return a.masked_fill(same, 0.0), b.masked_fill(same, 0.0)


def difference(a: Tensor, b: Tensor) -> Tensor:
    """`a - b` of `measurable` values, without NaN: infinite where one of them is NaN."""
    error = a - b
    if numerics.has_nan(error):
        error.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    return error
