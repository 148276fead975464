"""Every limit that a verdict rests on, with where it comes from. docs/switching.md says the same, and a test holds
the two together. Where nothing is published, the source says so and why the value is what it is."""

from dataclasses import dataclass

from precisionctl.fp8.carry import STALE as STALE_FACTOR
from precisionctl.fp8.statistics import UNDERFLOW as UNDERFLOW_SHARE


@dataclass(frozen=True)
class Threshold:
    """A limit, as it is shown, and its source."""

    value: float
    shown: str
    source: str


SATURATION = Threshold(1e-5, "0.001 %", "FP8-LM, arXiv 2310.18313, section 2.1")
"""Share of elements at the largest code. Above it FP8-LM's automatic scaling halves the scale."""

FEWEST = Threshold(10, "10 elements", "ours")
"""Saturated elements that are passed over whatever their share: each new record amax of a healthy tensor saturates one
or a few by a little, and a share of 0.001 % of a small calibration is less than that."""

UNDERFLOW = Threshold(UNDERFLOW_SHARE, "1 %", "ours")
"""Share of elements that become zero; exports tell of it too."""

KURTOSIS = Threshold(1000.0, "1,000", "Bondarenko et al., arXiv 2306.12929, table 2")
"""In that table 8-bit activations under one scale per tensor cost quality in every model whose average kurtosis is
1,018 or more, and next to nothing in those of 201 or less."""

GROWTH = Threshold(4.0, "4 times", "ours")
"""Newest amaxes over oldest ones. Two of the 18 binades that E4M3 spans, gone within one window of the history; batches
alone move an amax by less."""

TREND_ROWS = Threshold(8, "8 rows", "ours")
"""Recorded rows below which a history has no trend: quarters of less than two rows are single batches."""

STALE = Threshold(STALE_FACTOR, "2 times", "ours")
"""How far a recorded weight amax may be from the weights' own; `convert` makes it anew beyond that as well."""

ALL = {
    "saturation": SATURATION,
    "fewest": FEWEST,
    "underflow": UNDERFLOW,
    "kurtosis": KURTOSIS,
    "growth": GROWTH,
    "trend_rows": TREND_ROWS,
    "stale": STALE,
}
