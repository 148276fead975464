"""What an amax history shows: the range of amaxes, whether they grow, and whether the scale covers them."""

import math
from dataclasses import dataclass

from torch import Tensor

from precisionctl.codes.numerics import largest_code
from precisionctl.fp8.delayed_scaling import recorded_amax
from precisionctl.fp8.state import DelayedScaling, Role, RoleState
from precisionctl.readiness.thresholds import TREND_ROWS

_ROUNDING = 1 + 2.0**-22
"""`scale * amax`, with the scale computed from that amax, may exceed fp8_max by this factor through rounding."""


@dataclass(frozen=True)
class History:
    """Figures of the recorded rows of a role; with experts, the extremes over all of them.

    `smallest`, `largest` and `newest` are finite amaxes above 0. `growth` is the median of the newest quarter of the
    rows divided by that of the oldest; None if there are too few rows. `used` is `newest * scale / fp8_max`: above 1
    the tensor saturates, below 1 it has `-log2(used)` binades of headroom. `infinite` is True if an amax is infinite,
    which keeps the scale from changing. `silent` is the number of experts that recorded nothing while others did.
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
        """Whether the newest amax is beyond the scale's range."""
        return self.used > _ROUNDING


def read_history(state: RoleState, role: Role, recipe: DelayedScaling) -> History | None:
    """The figures of a role's state; None if it was never recorded."""
    if not state.recorded:
        return None
    scales = state.scale.reshape(-1)
    rows = state.amax_history.reshape(len(scales), -1)
    # A history of one row is zero at rest: its amax is only in the scale
    kept = rows[:, 1:] if rows.shape[1] > 1 else recorded_amax(state, role, recipe).reshape(-1, 1)
    recorded = [amaxes[amaxes > 0] for amaxes in kept]
    largest = largest_code(recipe.dtype(role))
    each = [_of_one(amaxes, scale, largest) for amaxes, scale in zip(recorded, scales, strict=True)]
    found = [one for one in each if one is not None]
    if not found:
        return _from_scales(state, role, recipe)
    growths = [one.growth for one in found if one.growth is not None]
    return History(
        rows=max(one.rows for one in found),
        smallest=min(one.smallest for one in found),
        largest=max(one.largest for one in found),
        newest=max(one.newest for one in found),
        growth=max(growths) if growths else None,
        used=max(one.used for one in found),
        infinite=bool(kept.isinf().any()),
        silent=sum(not len(amaxes) for amaxes in recorded),
    )


def _of_one(amaxes: Tensor, scale: Tensor, largest: float) -> History | None:
    """The history of one tensor, from its recorded rows, oldest first; None if none is finite. `largest` is fp8_max."""
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
        used=newest * float(scale) / largest,
        infinite=len(finite) < len(amaxes),
        silent=0,
    )


def _from_scales(state: RoleState, role: Role, recipe: DelayedScaling) -> History:
    """The figures if no row has a finite amax: from the amaxes that gave the scales."""
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
