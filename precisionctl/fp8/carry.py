"""What happens to FP8 state on the way to another checkpoint: carried over, filled in from a file, or computed anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from precisionctl.errors import MappingError
from precisionctl.fp8 import sidecar
from precisionctl.fp8.delayed_scaling import after_one_update, change_recipe, recorded_amax
from precisionctl.fp8.state import BY_RUN, DelayedScaling, Fp8State, Fp8States, Role, RoleState, core_attention_of
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

STALE = 2.0
"""A carried weight amax is stale where it is more than this factor above or below the amax of the weights."""


@dataclass(frozen=True)
class StateChange:
    """The FP8 state of a result. `from_weights` and `stale` are the modules whose weight role was computed from the
    weights, because it was never recorded, or does not fit them: bool of the scale's shape, `[]` or `[experts]`."""

    states: Fp8States
    from_weights: Mapping[str, Tensor]
    stale: Mapping[str, Tensor]


def amax_by_module(weight_amax: Mapping[str, float], gemms: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The amaxes of weights, keyed by weight name, gathered by module: FP32 of the shape in `gemms`, `[]` or
    `[experts]`."""
    found = {}
    for module, shape in gemms.items():
        names = [f"{module}.weight{number}" for number in range(shape[0])] if shape else [f"{module}.weight"]
        found[module] = torch.tensor([weight_amax[name] for name in names]).reshape(shape)
    return found


def check_modules(states: Fp8States, gemms: Mapping[str, tuple[int, ...]], file: Path | None = None) -> None:
    """Raise MappingError for state of a module, or of a number of experts, that the model does not have.

    `gemms` has the shape of each GEMM's scales, `[]` or `[experts]`, by module. `file` is where the state was read, if
    not from the model's own checkpoint.
    """
    shapes: dict[str, tuple[int, ...]] = {name: () for name in filter(None, map(core_attention_of, gemms))}
    shapes |= gemms
    for name, state in states.modules.items():
        if name not in shapes:
            what = "which this model does not have"
        elif any(part.scale.shape != shapes[name] for part in state.roles.values()):
            held, wanted = (f"{shape[0]} experts" if shape else "one module" for shape in (state.shape, shapes[name]))
            what = f"of {held}; this model has {wanted} there"
        else:
            continue
        raise MappingError(
            f"FP8 state of `{name}`, {what}",
            where=file or "",
            do="Give a file with the state of this model."
            if file
            else "Does the state belong to another model? --drop-fp8-state leaves it behind.",
        )


def read_state(file: Path, gemms: Mapping[str, tuple[int, ...]]) -> Fp8States:
    """The state in a sidecar file, which must fit a model with these GEMMs. Raises as `check_modules` and
    `sidecar.read` do."""
    states = sidecar.read(file)
    check_modules(states, gemms, file)
    return states


def from_other_experts(part: RoleState, role: Role, recipe: DelayedScaling) -> RoleState:
    """Fill in the experts that recorded nothing: each gets the state that one step with the largest amax of the other
    experts would have left. Unchanged where there are no experts, or none of them recorded anything."""
    largest = recorded_amax(part, role, recipe).amax().expand(part.scale.shape)
    return part.replaced(~part.recorded_each, after_one_update(largest.clone(), role, recipe))


def under_recipe(recipe: DelayedScaling, states: Fp8States) -> dict[str, Fp8State]:
    """The modules' states, changed to continue under another recipe (`change_recipe`)."""
    return {name: change_recipe(state, states.recipe, recipe) for name, state in states.modules.items()}


def first_recorded(states: Sequence[Fp8State]) -> Fp8State:
    """Combine several states of one module, under one recipe: each role of each expert is taken from the first state
    that recorded it."""
    roles: dict[Role, RoleState] = {}
    for state in states:
        roles |= {
            role: part.replaced(roles[role].recorded_each, roles[role]) if role in roles else part
            for role, part in state.roles.items()
        }
    return Fp8State(roles)


def filled_in(first: Fp8States, second: Fp8States) -> Fp8States:
    """The first, under its recipe, with what it never recorded taken from the second."""
    states = [first.modules, under_recipe(first.recipe, second)]
    modules = {
        name: first_recorded([each[name] for each in states if name in each])
        for name in dict.fromkeys([*states[0], *states[1]])
    }
    statistics = {**second.statistics, **first.statistics}
    return replace(first, modules=modules, raw={**second.raw, **first.raw}, statistics=statistics)


def is_stale(weight: RoleState, own: Tensor, recipe: DelayedScaling) -> Tensor:
    """Whether what was recorded of a weight, or of each expert's, is STALE: bool of the scale's shape. `own` is the
    weights' own amax, of that shape. What was never recorded is not."""
    recorded, own = recorded_amax(weight, "weight", recipe).double(), own.double()
    return weight.recorded_each & (own > 0) & ((recorded > STALE * own) | (recorded * STALE < own))


def carry_state(
    checkpoint_state: Fp8States | None, weight_amax: Mapping[str, Tensor], recipe: DelayedScaling | None
) -> StateChange:
    """The state that a run under delayed scaling starts with: `checkpoint_state`, with the weight role computed from
    the weights where it was not recorded, or where it is stale (STALE).

    `weight_amax` is the largest magnitude of each FP8 GEMM's weight, by module: FP32 `[]` or `[experts]`. Without
    `recipe` the state keeps its own. Roles that nothing is known of start as TE starts them, until calibration; state
    of a module without a weight there is kept. Raises MappingError for state of another number of experts.
    """
    shapes = {name: tuple(amax.shape) for name, amax in weight_amax.items()}
    new = recipe or (checkpoint_state.recipe if checkpoint_state else DelayedScaling())
    modules = {name: Fp8State.fresh(new.amax_history_len, shape) for name, shape in shapes.items()}
    if checkpoint_state:
        check_modules(
            replace(checkpoint_state, modules={n: s for n, s in checkpoint_state.modules.items() if n in shapes}),
            shapes,
        )
        modules |= under_recipe(new, checkpoint_state)
    states = replace(checkpoint_state, recipe=new) if checkpoint_state else Fp8States(new, {}, producer=BY_RUN)
    from_weights: dict[str, Tensor] = {}
    stale: dict[str, Tensor] = {}
    for name, amax in weight_amax.items():
        weight = modules[name].roles["weight"]
        unrecorded, outdated = ~weight.recorded_each, is_stale(weight, amax, new)
        if unrecorded.any():
            from_weights[name] = unrecorded
        if outdated.any():
            stale[name] = outdated
        weight = weight.replaced(unrecorded | outdated, after_one_update(amax, "weight", new))
        modules[name] = Fp8State({**modules[name].roles, "weight": weight})
    return StateChange(replace(states, modules=modules), from_weights, stale)
