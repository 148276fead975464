"""Statistics: counts and sums over the elements of a tensor, and what each FP8 scaling would lose of it.

`codes/health.py` measures them and defines the terms; the sidecar stores them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Literal

Scaling = Literal["delayed", "current", "block", "mxfp8", "nvfp4"]
FP8_SCALINGS: tuple[Scaling, ...] = ("delayed", "current", "block", "mxfp8")
"""Those of FP8, which are measured."""
NAMES: Mapping[Scaling, str] = {
    "delayed": "delayed",
    "current": "current",
    "block": "128-block",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
}


def scaling_words(scaling: Scaling, link: str = " with") -> str:
    """What a run under a scaling computes in: `FP8 with delayed scaling`, or `NVFP4`, which is the name of a scaling
    too."""
    return NAMES[scaling] if scaling == "nvfp4" else f"FP8{link} {NAMES[scaling]} scaling"


UNDERFLOW = 0.01
"""Share of elements that become zero beyond which a tensor is better kept out of FP8. With one scale for the tensor, in
E4M3, a Gaussian with amax at 5 sigma loses 0.001 %; to lose 1 % it needs an outlier at 5,700 sigma."""


def decibels(signal: float, noise: float) -> float:
    """A ratio of two sums of squares in dB: infinite without noise, minus infinity if a sum is not finite."""
    if noise == 0:
        return math.inf
    if not math.isfinite(noise) or not math.isfinite(signal):
        return -math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


@dataclass(frozen=True)
class Loss:
    """What one scaling did to `elements` elements: nonzero ones that became zero, ones that were clamped, the sum of
    all squares and that of the squared differences. Infinities count as saturated and are not in the sums."""

    elements: int = 0
    underflows: int = 0
    saturated: int = 0
    power: float = 0.0
    error: float = 0.0

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def underflow(self) -> float:
        """Share of all elements, 0 to 1."""
        return self.underflows / self.elements if self.elements else 0.0

    @property
    def saturation(self) -> float:
        """Share of all elements, 0 to 1."""
        return self.saturated / self.elements if self.elements else 0.0

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise in dB; infinite where nothing was lost."""
        return decibels(self.power, self.error)


@dataclass(frozen=True)
class Statistics:
    """Statistics of one tensor in one role, over any number of passes.

    `amax` ignores NaN, as TE's does. `sum_2` and `sum_4`, the sums of x^2 and x^4, ignore NaN and infinities. A scaling
    that was not measured has a `Loss` of 0 elements.
    """

    elements: int = 0
    zeros: int = 0
    nonfinite: int = 0
    amax: float = 0.0
    sum_2: float = 0.0
    sum_4: float = 0.0
    losses: Mapping[Scaling, Loss] = field(default_factory=lambda: dict.fromkeys(FP8_SCALINGS, Loss()))

    def merge(self, other: "Statistics") -> "Statistics":
        """The statistics of both together. Counts and amax do not depend on the order of merging; sums do in their last
        bits."""
        return Statistics(
            self.elements + other.elements,
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
            max(self.amax, other.amax),
            self.sum_2 + other.sum_2,
            self.sum_4 + other.sum_4,
            {scaling: self.losses[scaling] + other.losses[scaling] for scaling in FP8_SCALINGS},
        )

    @property
    def kurtosis(self) -> float:
        """`n * sum x^4 / (sum x^2)^2`: 1 where all magnitudes are equal, 3 for a Gaussian; NaN for zeros alone."""
        finite = self.elements - self.nonfinite
        return finite * self.sum_4 / self.sum_2**2 if self.sum_2 else math.nan

    def as_row(self) -> list[float]:
        """All of it as ROW_LENGTH FP64 numbers: `_FIELDS` in order, then the fields of `Loss` for each scaling."""
        own = [float(getattr(self, name)) for name in _FIELDS]
        return own + [float(number) for scaling in FP8_SCALINGS for number in astuple(self.losses[scaling])]

    @staticmethod
    def from_row(row: Sequence[float]) -> "Statistics":
        """The inverse of `as_row`. Raises ValueError for numbers that no tensor can have produced."""
        own, rest = row[: len(_FIELDS)], row[len(_FIELDS) :]
        size = len(rest) // len(FP8_SCALINGS)
        losses = {
            scaling: Loss(*map(_count, rest[i : i + 3]), *map(_not_negative, rest[i + 3 : i + size]))
            for scaling, i in zip(FP8_SCALINGS, range(0, len(rest), size), strict=True)
        }
        elements, zeros, nonfinite = map(_count, own[:3])
        amax, sum_2, sum_4 = map(_not_negative, own[3:])
        found = Statistics(elements, zeros, nonfinite, amax, sum_2, sum_4, losses)
        counts = [(found.elements, found.zeros, found.nonfinite)]
        counts += [(loss.elements, loss.underflows, loss.saturated) for loss in losses.values()]
        if any(part > total for total, *parts in counts for part in parts):
            raise ValueError("more elements were counted than there are")
        return found


_FIELDS = ("elements", "zeros", "nonfinite", "amax", "sum_2", "sum_4")
AMAX = _FIELDS.index("amax")
"""Index of amax in `as_row`: the only one that is merged by maximum instead of by sum."""
ROW_LENGTH = len(_FIELDS) + 5 * len(FP8_SCALINGS)


def _count(number: float) -> int:
    if not (0 <= number < 2**53 and number == int(number)):
        raise ValueError(f"{number} is not a count")
    return int(number)


def _not_negative(number: float) -> float:
    if not number >= 0:
        raise ValueError(f"{number} is not a magnitude")
    return number
