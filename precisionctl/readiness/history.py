"""What an amax history says by itself: how far amaxes go, whether they grow, and whether the scale covers them."""

import math
from dataclasses import dataclass

from torch import Tensor

from precisionctl.fp8.numerics import FP8_MAX, recorded_amax
from precisionctl.fp8.state import DelayedScaling, Role, RoleState
from precisionctl.readiness.thresholds import TREND_ROWS

_ROUNDING = 1 + 2.0**-22
"""`scale * amax` of a scale that was made of that amax may exceed fp8_max by as much."""


@dataclass(frozen=True)
class History:
    """The recorded rows of a role; of experts, the extremes over all of them.

    `smallest`, `largest` and `newest` are amaxes, finite and above 0. `growth` is the median of the newest quarter of
    the rows over that of the oldest, None where there are too few. `used` is `newest * scale / fp8_max`: above 1 such
    a tensor saturates, below it has `-log2(used)` binades of headroom. `infinite`: an amax is, which freezes the scale.
    `silent` counts experts that recorded nothing while others did.
    """

    rows: int
    smallest: float
    largest: float
    newest: float
    growth: float | None
    used: float
    infinite: bool
    silent: int

    @property
    def saturates(self) -> bool:
        return self.used > _ROUNDING


def read_history(state: RoleState, role: Role, recipe: DelayedScaling) -> History | None:
    """None for a role that was never recorded."""
    if not state.recorded:
        return None
    scales = state.scale.reshape(-1)
    rows = state.amax_history.reshape(len(scales), -1)
    # a history of one row rests at zero: its amax went into the scale
    kept = rows[:, 1:] if rows.shape[1] > 1 else recorded_amax(state, role, recipe).reshape(-1, 1)
    recorded = [amaxes[amaxes > 0] for amaxes in kept]
    each = [_of_one(amaxes, scale) for amaxes, scale in zip(recorded, scales, strict=True)]
    found = [one for one in each if one is not None]
    if not found:
        return _from_scales(state, role, recipe)
    largest = FP8_MAX[recipe.dtype(role)]
    growths = [one.growth for one in found if one.growth is not None]
    return History(
        rows=max(one.rows for one in found),
        smallest=min(one.smallest for one in found),
        largest=max(one.largest for one in found),
        newest=max(one.newest for one in found),
        growth=max(growths) if growths else None,
        used=max(one.used for one in found) / largest,
        infinite=bool(kept.isinf().any()),
        silent=sum(not len(amaxes) for amaxes in recorded),
    )


def _of_one(amaxes: Tensor, scale: Tensor) -> History | None:
    """The history of one tensor, from its recorded rows, oldest first. `used` is not divided by fp8_max yet."""
    finite = amaxes[amaxes.isfinite()]
    if not len(finite):
        return None
    newest, growth = float(finite[-1]), None
    if len(finite) >= TREND_ROWS.value:  # by medians, which single batches do not move
        quarter = len(finite) // 4
        growth = float(finite[-quarter:].median() / finite[:quarter].median())
    return History(
        rows=len(amaxes),
        smallest=float(finite.min()),
        largest=float(finite.max()),
        newest=newest,
        growth=growth,
        used=newest * float(scale),
        infinite=len(finite) < len(amaxes),
        silent=0,
    )


def _from_scales(state: RoleState, role: Role, recipe: DelayedScaling) -> History:
    """Where no row is left, the amaxes that gave the scales."""
    amaxes = recorded_amax(state, role, recipe).reshape(-1)
    amaxes = amaxes[amaxes > 0]
    infinite = bool(state.amax_history.isinf().any())
    smallest, largest = (float(amaxes.min()), float(amaxes.max())) if len(amaxes) else (0.0, 0.0)
    return History(
        rows=0,
        smallest=smallest,
        largest=largest,
        newest=largest,
        growth=None,
        used=2.0**-recipe.margin if len(amaxes) else 0.0,
        infinite=infinite,
        silent=0,
    )


def headroom(history: History) -> float:
    """Binades between the newest amax under its scale and fp8_max; negative where it saturates."""
    return -math.log2(history.used) if history.used else math.inf
