"""The update that delayed scaling makes once per step, and states that follow from others by it.

It is that of Transformer Engine's fused kernel; TE's Python fallback (`NVTE_UNFUSED_FP8_UPDATE=1`) divides by 2**margin
last and rolls every column, and differs. Everything here works on one tensor's numbers (`[]`, history `[H]`) and on
several at once (`[N]`, `[N, H]`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from precisionctl.codes.numerics import delayed_scale, quotient, scaled_max
from precisionctl.fp8.state import DelayedScaling, Fp8State, Role, RoleState
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor


def update_delayed(state: RoleState, dtype: torch.dtype, recipe: DelayedScaling) -> RoleState:
    """State after the update at the end of a step whose amax is in row 0 of the history.

    TE's fused kernel: the scale comes from the largest row, or from row 0 under `most_recent`; then row 0
    becomes the newest (last) row and rests at zero. Where row 0 is zero the tensor was not used in the step,
    and history and scale stay as they are. NaN rows roll but are passed over by `max`.
    """
    history = state.amax_history
    last = history[..., 0]
    used = last != 0
    seen = last if recipe.amax_compute_algo == "most_recent" else history.nan_to_num(nan=0.0, posinf=math.inf).amax(-1)
    scale = delayed_scale(torch.where(used, seen, 0.0), state.scale, dtype, recipe.margin)
    rolled = history.roll(-1, -1)
    rolled[..., 0] = 0.0
    return RoleState(scale, torch.where(used.unsqueeze(-1), rolled, history))


def without_infinite(history: Tensor, only_if: Tensor) -> Tensor:
    """The history, of any shape, with infinite and NaN entries set to 0 (not recorded) if `only_if` (bool `[]`) is set.

    The condition is a tensor so that the caller need not synchronise with the GPU.
    """
    return history.masked_fill(~history.isfinite() & only_if, 0.0)


def after_one_update(amax: Tensor, role: Role, recipe: DelayedScaling) -> RoleState:
    """The state TE has for a new tensor after one step in which its amax was `amax` (FP32 `[]` or `[N]`)."""
    history = amax.new_zeros(*amax.shape, recipe.amax_history_len)
    history[..., 0] = amax
    return update_delayed(RoleState(torch.ones_like(amax), history), recipe.dtype(role), recipe)


def recorded_amax(state: RoleState, role: Role, recipe: DelayedScaling) -> Tensor:
    """Largest finite amax in the history, FP32 `[]` or `[N]`; where the history holds none, the amax that gave
    the scale; 0 where nothing was ever recorded."""
    history = state.amax_history
    largest = torch.where(history.isfinite(), history, 0.0).amax(-1)
    from_scale = torch.where(
        state.scale == 1, 0.0, quotient(scaled_max(recipe.dtype(role), recipe.margin), state.scale)
    )
    return torch.where(largest > 0, largest, from_scale)


def change_recipe(state: Fp8State, old: DelayedScaling, new: DelayedScaling) -> Fp8State:
    """The state to continue with under another recipe.

    Histories keep their newest rows. A history of one row holds nothing at rest; when it grows, the amax that gave its
    scale becomes the newest row. Where margin, format or algorithm differ, scales are those that TE would have computed
    under `new` from the amaxes recorded under `old`.
    """
    roles: dict[Role, RoleState] = {}
    for role, part in state.roles.items():
        roles[role] = part.resized(new.amax_history_len)
        if new.amax_history_len > old.amax_history_len == 1:  # its one row is zero at rest; the amax is in the scale
            roles[role].amax_history[..., -1] = recorded_amax(part, role, old)
        if (old.margin, old.dtype(role), old.amax_compute_algo) == (new.margin, new.dtype(role), new.amax_compute_algo):
            continue
        window = 1 if new.amax_compute_algo == "most_recent" else new.amax_history_len
        seen = recorded_amax(RoleState(part.scale, part.amax_history[..., -window:]), role, old)
        scale = delayed_scale(seen, part.scale, new.dtype(role), new.margin)
        roles[role] = RoleState(scale, roles[role].amax_history)
    return Fp8State(roles)
