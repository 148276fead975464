"""What codes have lost of the values that they encode: whether their scales make sense; and what rounding has lost.

The limits follow from E4M3's arithmetic. A value whose code is a normal number is off by at most 1/16 of itself; below
that, by 2^-10 codes. Under a scale from an amax, the largest of the n values that share it has a code of 224 or more.
So noise is at most 1/256 + n * 2^-20 / 224^2 of the signal, whatever the values are: 24 dB for n up to a million, 20 dB
for n up to a hundred million.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from precisionctl.codes import numerics
from precisionctl.codes.statistics import Loss
from precisionctl.torch_when_used import torch
from precisionctl.verify.differences import Differences, difference

if TYPE_CHECKING:
    from torch import Tensor

LOWEST_DB = 10.0
"""Below it codes are no encoding of the values: a tenth of the signal is noise. Honest scales that several tensors
share, or that clip, stay above; a scale that sends every value to zero, or most beyond the largest code, gives 0."""

EXPECTED_DB = 20.0
"""The SQNR that scales from an amax always reach, by the arithmetic above. A lower one is reported."""

TOLD_SHARE = 0.1
"""From this share on, nonzero values that became zero, or values beyond the largest code, are reported."""

NEGLIGIBLE = 2.0**-27
"""Blocks of values with an RMS this small may become zero without counting as lost: half of the smallest code is 2^-28
under the smallest scale that tools allow (vLLM's min_scaling_factor, 1 / (448 * 512)). That is so beside larger values
of the tensor. If these are all that it has, they are what is computed with: a norm behind them, or another tensor as
large as they are small, makes them count."""


@dataclass
class Losses:
    """The losses of one tensor `[rows, columns]` whose values share a scale in blocks of `block`, shown rows in order.

    `packed`: codes are other than FP8. `most_zeros`: of such codes, the share of values that become zero above which
    that is reported, if it is known of them. `lost` of `blocks` have an SQNR under LOWEST_DB, and `negligible` more of
    them that have values of at most NEGLIGIBLE. `some_left`: some value has not become zero.
    """

    rows: int
    columns: int
    block: tuple[int, int]
    packed: bool = False
    most_zeros: float | None = None
    total: Loss = Loss()
    largest: float = 0.0
    largest_error: float = 0.0
    lost: int = 0
    negligible: int = 0
    blocks: int = 0
    some_left: bool = False
    _open: Tensor | None = field(default=None, repr=False)
    """Signal and noise so far, FP64 `[2, blocks]`, of the row of blocks that is not complete."""

    def see(self, row: int, codes: Tensor, values: Tensor, decoded: Tensor) -> None:
        """Rows from `row` on: codes, and FP32 values and what the codes decode to, `measurable`, `[n, columns]`."""
        error = difference(values, decoded).abs_()
        self.largest_error = max(self.largest_error, float(error.max()))
        self.largest = max(self.largest, float(numerics.amax(values)))
        # FP32 has squares of numbers from 2^-74 to 2^63 alone.
        power, noise = (self._by_block(each.double().square_()) for each in (values, error))
        zeros = decoded.numpy() == 0  # NumPy counts several times as fast as PyTorch
        self.some_left = self.some_left or not zeros.all()
        if self.packed:  # only the largest code can be exceeded by half of its number
            saturated = int(((values.abs() > 1.5 * decoded.abs()) & (decoded != 0)).sum())
        else:
            saturated = _beyond(codes, values, decoded)
        self.total += Loss(
            elements=values.numel(),
            underflows=int(np.count_nonzero(values.numpy()[zeros])) if zeros.any() else 0,
            saturated=saturated,
            power=float(power.sum()),
            error=float(noise.sum()),
        )

        sums = torch.stack([power, noise])
        high = min(self.block[0], self.rows)
        if high > 1:
            numbers = torch.arange(row, row + len(values)) // high - row // high
            sums = sums.new_zeros(2, int(numbers[-1]) + 1, sums.shape[2]).index_add_(1, numbers, sums)
        if self._open is not None:
            sums[:, 0] += self._open
        end = row + len(values)
        whole = end % high == 0 or end == self.rows
        self._open = None if whole else sums[:, -1].clone()
        self._judge(sums if whole else sums[:, :-1])

    def _by_block(self, each: Tensor) -> Tensor:
        """Sums over the columns of a block, FP64 `[n, blocks]`."""
        wide = min(self.block[1], self.columns)
        padded = torch.nn.functional.pad(each, (0, -self.columns % wide)) if self.columns % wide else each
        return padded.view(len(each), -1, wide).sum(2)

    def _judge(self, sums: Tensor) -> None:
        """Count blocks that are complete, of signal and noise, FP64 `[2, n, blocks]`."""
        signal, noise = sums
        elements = min(self.block[0], self.rows) * min(self.block[1], self.columns)
        lost, counts = noise > signal * 10 ** (-LOWEST_DB / 10), signal > elements * NEGLIGIBLE**2
        self.lost += int((lost & counts).sum())
        self.negligible += int((lost & ~counts).sum())
        self.blocks += signal.numel()

    @property
    def why(self) -> str:
        """In words, why the codes do not represent the values; empty if they do."""
        lost = self.lost if self.some_left else self.lost + self.negligible
        if not lost:
            return ""
        of = "its scale loses" if self.blocks == 1 else f"{lost} of {self.blocks} scales lose"
        return f"{of} the values (SQNR under {LOWEST_DB:.0f} dB): {self._shares()}"

    @property
    def remark(self) -> str:
        """In words, what is worth knowing of codes that do represent the values."""
        told = []
        if self.negligible:
            small = f"negligible values (RMS of at most {NEGLIGIBLE:.2g}, beside larger ones)"
            told.append(f"{self.negligible} of {self.blocks} scales lose {small}")
        zeros, beyond = self.total.underflow, self.total.saturation
        if self.packed:  # sixteen numbers, or steps of one size, cannot do better than to lose many
            spoiled = self.most_zeros is not None and zeros > self.most_zeros
        else:
            spoiled = max(zeros, beyond) >= TOLD_SHARE
        if spoiled:
            rms = math.sqrt(self.total.power / max(1, self.total.elements))
            told.append(f"{self._shares()}; the largest value is {self.largest:.3g}, their RMS {rms:.3g}")
        elif not self.packed and self.total.sqnr < EXPECTED_DB:
            told.append(f"SQNR {self.total.sqnr:.1f} dB, of {EXPECTED_DB:.0f} at least")
        return "; ".join(told)

    def _shares(self) -> str:
        zero, beyond = self.total.underflow, self.total.saturation
        return f"{zero:.1%} of values became zero, {beyond:.1%} were beyond the largest code"


def lost_in_rounding(found: Differences, unit: float) -> tuple[str, str]:
    """In words, why values that are rounded to another dtype no longer represent the others, by the limits of codes;
    and what else is worth knowing. Empty if there is nothing. A value that becomes a normal number is off by at most
    `unit` of itself (2^-11 in FP16, for 66 dB), one below these by up to all of it."""
    shares = f"{found.zeroed / max(1, found.elements):.1%} of values became zero"
    if found.sqnr_db < LOWEST_DB:
        return f"rounding loses the values (SQNR under {LOWEST_DB:.0f} dB): {shares}", ""
    expected = -20 * math.log10(unit)
    if found.sqnr_db < expected or found.zeroed >= TOLD_SHARE * found.elements:
        return "", f"{shares}; SQNR {found.sqnr_db:.1f} dB, of {expected:.0f} at least in normal numbers"
    return "", ""


def _beyond(codes: Tensor, values: Tensor, decoded: Tensor) -> int:
    """The number of values that were too large for FP8: more than 1/28 (16/448) above the largest code, halfway to the
    next code if there were one."""
    largest = int(torch.tensor(numerics.largest_code(codes.dtype)).to(codes.dtype).view(torch.uint8))
    at = torch.from_numpy(np.flatnonzero((codes.reshape(-1).view(torch.uint8).numpy() & 0x7F) == largest))
    return int((values.view(-1)[at].abs() > decoded.view(-1)[at].abs() * (29 / 28)).sum())
