"""What happens to numbers on the way: how a job's tensors are encoded, and what becomes of the FP8 state."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch

from precisionctl.fp8.numerics import after_one_update, change_recipe, recorded_amax
from precisionctl.fp8.state import DelayedScaling, Fp8State, Fp8States

STALE = 2.0
"""A carried weight amax further than this factor from the weights' own is not of these weights."""


@dataclass(frozen=True)
class Encode:
    """Encode tensors of a job, each in its target's dtype.

    `blocks` says how many rows and columns of each share a scale; what it leaves out stays values. `shared`: all have
    the one scale that their joint amax gives (engines fuse q/k/v and gate/up, and requantize where their scales
    differ). `weight_scales` names the tensor that receives each one's `scale_inv`; `input_scales` gives tensors and
    their values.
    """

    blocks: Mapping[str, tuple[int, int]]
    weight_scales: Mapping[str, str]
    input_scales: Mapping[str, float]
    shared: bool = False
    power_of_2: bool = False

    def describe(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class StateChange:
    """The FP8 state of a result; which modules' weight role was made from the weights, and why."""

    states: Fp8States
    from_weights: tuple[str, ...]
    stale: tuple[str, ...]


def fp8_state(
    carried: Fp8States | None, weight_amax: Mapping[str, float], recipe: DelayedScaling | None
) -> StateChange:
    """State for a delayed-scaling target: what is carried, and the weight role from the weights elsewhere.

    `weight_amax` is the largest magnitude of each FP8 GEMM's weight, by module. `recipe` None keeps the carried one.
    Roles with nothing to carry start as TE starts them and wait for calibration.
    """
    old = carried.recipe if carried else DelayedScaling()
    new = recipe or old
    modules: dict[str, Fp8State] = dict.fromkeys(weight_amax, Fp8State.fresh(new.amax_history_len))
    if carried:
        modules |= {name: change_recipe(state, old, new) for name, state in carried.modules.items()}
    states = replace(carried, recipe=new) if carried else Fp8States(new, {}, producer="precisionctl")
    unrecorded = [name for name in weight_amax if not modules[name].roles["weight"].recorded]
    stale = [name for name, amax in weight_amax.items() if name not in unrecorded and _stale(modules[name], amax, new)]
    for name in (*unrecorded, *stale):
        weight = after_one_update(torch.tensor(weight_amax[name]), "weight", new)
        modules[name] = Fp8State({**modules[name].roles, "weight": weight})
    return StateChange(replace(states, modules=modules), tuple(unrecorded), tuple(stale))


def _stale(state: Fp8State, amax: float, recipe: DelayedScaling) -> bool:
    recorded = float(recorded_amax(state.roles["weight"], "weight", recipe))
    return amax > 0 and (recorded <= 0 or abs(math.log(recorded / amax)) > math.log(STALE))
