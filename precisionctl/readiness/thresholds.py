"""Every limit that a verdict depends on, and its source. docs/switching.md lists the same limits, which a test checks.
The source of a limit that is not published is `ours`, and its docstring says why it has this value."""

from dataclasses import dataclass

from precisionctl.codes.four_bit_loss import ZEROS_LIMIT
from precisionctl.codes.statistics import UNDERFLOW as UNDERFLOW_SHARE
from precisionctl.fp8.carry import STALE as STALE_FACTOR


@dataclass(frozen=True)
class Threshold:
    """A limit: its `value`, how it is `shown` to people, and the `source` of the value."""

    value: float
    shown: str
    source: str


SATURATION = Threshold(1e-5, "0.001 %", "FP8-LM, arXiv 2310.18313, section 2.1")
"""Share of elements at the largest code. Above it FP8-LM's automatic scaling halves the scale."""

FEWEST = Threshold(10, "10 elements", "ours")
"""Fewer saturated elements than this are ignored whatever their share: each new largest amax of a healthy tensor
saturates one or a few elements slightly, and those can be more than 0.001 % of a small calibration."""

UNDERFLOW = Threshold(UNDERFLOW_SHARE, "1 %", "ours")
"""Share of elements that become zero; exports report it too."""

KURTOSIS = Threshold(1000.0, "1,000", "Bondarenko et al., arXiv 2306.12929, table 2")
"""In that table 8-bit activations under one scale per tensor cost quality in every model whose average kurtosis is
1,018 or more, and next to nothing in those of 201 or less."""

GROWTH = Threshold(4.0, "4 times", "ours")
"""Ratio of the newest amaxes to the oldest. A growth of 4 takes two of the 18 binades of E4M3 within one history; the
differences between batches are smaller."""

TREND_ROWS = Threshold(8, "8 passes", "ours")
"""Recorded rows that a history needs for a trend: below this, a quarter of the history is a single batch."""

PASSES = Threshold(64, "64 passes", "ours")
"""Recorded passes below which a verdict on activations and gradients is said to rest on little: `calibrate`'s default;
amaxes of activations settle within a few dozen."""

STALE = Threshold(STALE_FACTOR, "2 times", "ours")
"""The factor by which a recorded weight amax may differ from the weights' own; beyond it, `convert` recomputes it."""

NOISE = Threshold(2.0, "2 times", "ours")
"""Noise of a weight in four bits, in times that of Gaussian weights: 2 times is 3 dB. In INT4 a channel of outliers 8
times the others' costs 8 dB."""

ZEROS = Threshold(ZEROS_LIMIT, "3 times", "ours")
"""Elements of a weight that become zero in four bits, in times those of Gaussian weights. An outlier that takes up its
group's range is most of the group's signal too, so SQNR stays high, in NVFP4 above all."""

ALL = {
    "saturation": SATURATION,
    "fewest": FEWEST,
    "underflow": UNDERFLOW,
    "kurtosis": KURTOSIS,
    "growth": GROWTH,
    "trend_rows": TREND_ROWS,
    "passes": PASSES,
    "stale": STALE,
    "noise": NOISE,
    "zeros": ZEROS,
}
