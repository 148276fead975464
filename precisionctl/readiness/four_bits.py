"""What exports in four bits would cost: the noise that they add to each weight, and which modules to leave out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from precisionctl.codes.four_bit_loss import FORMATS, GAUSSIAN_DB, MOST_ZEROS, FourBitScheme
from precisionctl.codes.statistics import Loss
from precisionctl.readiness.patterns import shortened
from precisionctl.readiness.thresholds import NOISE


@dataclass(frozen=True)
class FourBitCost:
    """The cost of four bits, by scheme: for each module's weight (the worst expert's) its `sqnr_db`, and the share of
    elements that become zero. `left_out` are patterns, as for a recipe's keep_bf16, of modules that lose too much by
    NOISE or MOST_ZEROS: they have outliers, which finer formats can represent."""

    sqnr_db: Mapping[str, Mapping[FourBitScheme, float]]
    underflow: Mapping[str, Mapping[FourBitScheme, float]]
    left_out: Mapping[FourBitScheme, tuple[str, ...]]


def cost_of_four_bits(losses: Mapping[str, Sequence[Mapping[FourBitScheme, Loss]]]) -> FourBitCost:
    """The cost, of what was measured of each module: one weight, or one for each expert."""
    sqnr, zeros = {}, {}
    for module, weights in losses.items():
        sqnr[module] = {scheme: min(each[scheme].sqnr for each in weights) for scheme in FORMATS}
        zeros[module] = {scheme: max(each[scheme].underflow for each in weights) for scheme in FORMATS}
    left_out = {}
    for scheme in FORMATS:
        lowest = GAUSSIAN_DB[scheme] - 10 * math.log10(NOISE.value)
        noisy = {
            module for module in losses if sqnr[module][scheme] < lowest or zeros[module][scheme] > MOST_ZEROS[scheme]
        }
        left_out[scheme] = shortened(noisy, list(losses))
    return FourBitCost(sqnr, zeros, left_out)
