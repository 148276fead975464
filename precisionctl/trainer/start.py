"""The FP8 state of a run's first step, role by role: never empty histories in silence.

Each role has the first of these that recorded it: the state of a file that the command names; that in the checkpoint,
carried from FP8 training or collected in BF16 training, if it is of the checkpoint's weights; warm-up passes, forward
and backward in BF16 over the coming micro-batches, without an update and without consuming them, a history row each. A
weight that none of them recorded, or not as it is, has its amax from itself. An expert that has seen no token starts
with the largest amax of the layer's others.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from precisionctl.conversion.known_state import KnownState
from precisionctl.fp8.carry import (
    StateChange,
    amax_by_module,
    carry_state,
    check_modules,
    first_recorded,
    from_other_experts,
    under_recipe,
)
from precisionctl.fp8.numerics import amax, change_recipe
from precisionctl.fp8.state import IN_USE, DelayedScaling, Fp8State, Fp8States, Role
from precisionctl.trainer.backends.base import Fp8Linear, fp8_linears
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.loop import backward
from precisionctl.trainer.parallel.world import local
from precisionctl.trainer.run import Run
from precisionctl.trainer.saved.loading import COLLECTED

Source = Literal[
    "carried",
    "collected in BF16 training",
    "calibrated",
    "warm-up",
    "from the weights",
    "from other experts",
    "never recorded",
]

CALIBRATED = "precisionctl calibrate"
"""The producer of a state that calibration made."""

_PRODUCERS: Mapping[str, Source] = {COLLECTED: "collected in BF16 training", CALIBRATED: "calibrated"}


@dataclass(frozen=True)
class Fp8Start:
    """What a run starts with: of how many GEMMs a role's state is from where, an expert's being one of its own; and the
    state that goes along unused, of modules which the run keeps in BF16."""

    counts: Mapping[Source, Mapping[Role, int]]
    carried: Fp8States | None
    notes: tuple[str, ...] = ()


def start_fp8(run: Run, state: KnownState, aside: Fp8States | None, *, cold: bool) -> Fp8Start:
    """Set the state of every FP8 linear of the run's model from what may be used of the checkpoint's `state`; `cold` is
    scale 1 and empty histories everywhere, whatever there is. `aside` is what the checkpoint itself carried unused."""
    linears, recipe = fp8_linears(run.model), run.recipe.precision.delayed
    carried, left = _unused((*state.usable, state.outdated, aside), linears)
    if not linears:
        return Fp8Start({}, carried, left)
    fresh = {name: Fp8State.fresh(recipe.amax_history_len, _shape(linear)) for name, linear in linears.items()}
    if cold:
        for name, linear in linears.items():
            linear.set_fp8_state(fresh[name])
        notes = ("cold start: scale 1 and empty histories everywhere",)
        return Fp8Start({"never recorded": _all_gemms(linears)}, None, notes)
    shapes = {name: state.shape for name, state in fresh.items()}
    known = [_fitting(states, shapes, recipe) for states in state.usable]
    if not all(_recorded(name, fresh, known) for name in linears):
        known.append(("warm-up", _warm_up(run)))
    first = {
        name: first_recorded([modules[name] for _, modules in known if name in modules] or [fresh[name]])
        for name in linears
    }
    change = carry_state(Fp8States(recipe, first), amax_by_module(_weight_amax(run, linears), shapes), recipe)
    sources = {name: _complete(name, linear, change, known) for name, linear in linears.items()}
    return Fp8Start(_counts(sources), carried, (*left, *_notes(change, sources)))


def start_collecting(run: Run, found: Fp8States | None) -> Fp8Start:
    """Let a BF16 run record what an FP8 run would; histories that were found go on, under the recipe of the run."""
    recipe = run.recipe.precision.delayed
    run.recorder = Recorder(replace(run.recipe.precision, fp8=True), run.device, run.world)
    if found:
        run.recorder.load({name: change_recipe(state, found.recipe, recipe) for name, state in found.modules.items()})
    notes = ("amaxes are collected: each pass is a row of the histories in the checkpoints' sidecar",)
    return Fp8Start({}, found, notes)


def go_on_fp8(run: Run, saved: Fp8States | None, carried: Fp8States | None) -> Fp8Start:
    """Set the state that the run itself saved, as it is."""
    linears = fp8_linears(run.model)
    for name, linear in linears.items():
        assert saved is not None, "such a run saves its state"
        linear.set_fp8_state(saved.modules[name])
    return Fp8Start({"carried": _all_gemms(linears)} if linears else {}, carried)


def _shape(linear: Fp8Linear) -> tuple[int, ...]:
    """The shape of its scales: `[]`, or `[experts]`."""
    state = linear.fp8_state()
    assert state is not None, "fp8_linears lists the linears that keep state"
    return state.shape


def _all_gemms(linears: Mapping[str, Fp8Linear]) -> Mapping[Role, int]:
    return dict.fromkeys(IN_USE, sum(math.prod(_shape(linear)) for linear in linears.values()))


def _weight_amax(run: Run, linears: Mapping[str, Fp8Linear]) -> dict[str, float]:
    """Largest magnitudes, by the weights' names."""
    split = ((name, *name.rpartition(".")[::2]) for name in run.model.shards.tensors)
    weights = [name for name, module, leaf in split if module in linears and leaf.startswith("weight")]
    if not weights:
        return {}
    here, none = run.optimizer.parameters, torch.zeros((), device=run.device)  # an expert may be another rank's
    mine = torch.stack(
        [amax(local(here[name]).to(run.model.backend.dtype)) if name in here else none for name in weights]
    )
    return dict(zip(weights, run.world.all_reduce_max(mine).tolist(), strict=True))


Known = Sequence[tuple[Source, Mapping[str, Fp8State]]]
"""Where states are from, first the best; by module."""


def _fitting(
    states: Fp8States, shapes: Mapping[str, tuple[int, ...]], recipe: DelayedScaling
) -> tuple[Source, Mapping[str, Fp8State]]:
    """Raises MappingError for state of another number of experts."""
    mine = replace(states, modules={name: state for name, state in states.modules.items() if name in shapes})
    check_modules(mine, shapes)
    return _PRODUCERS.get(states.producer, "carried"), under_recipe(recipe, mine)


def _recorded(name: str, fresh: Mapping[str, Fp8State], known: Known) -> bool:
    """Whether the activations and gradients of a linear, of each expert, are known."""
    state = first_recorded([*(modules[name] for _, modules in known if name in modules), fresh[name]])
    return all(bool(state.roles[role].recorded_each.all()) for role in IN_USE if role != "weight")


def _unused(
    ways: Iterable[Fp8States | None], linears: Mapping[str, Fp8Linear]
) -> tuple[Fp8States | None, tuple[str, ...]]:
    """What no linear takes up, of the first that has such a thing, for each has its own date and recipe. A note where
    something of others is left."""
    rests = [states.without(linears) for states in ways if states]
    kept = next((rest for rest in rests if rest.modules or rest.raw), None)
    left = [name for rest in rests for name in rest.modules if kept and name not in kept.modules]
    notes = (f"older FP8 state of {len(left)} modules is left behind, e.g. of {left[0]}",) if left else ()
    return kept, notes


def _complete(name: str, linear: Fp8Linear, change: StateChange, known: Known) -> dict[Role, Counter[Source]]:
    """Give a linear its state. Returns of how many of its GEMMs each role is from where."""
    state = change.states.modules[name]
    roles = dict(state.roles)
    roles |= {role: from_other_experts(roles[role], role, change.states.recipe) for role in IN_USE}
    linear.set_fp8_state(Fp8State(roles))
    none = torch.zeros(state.shape, dtype=torch.bool)
    anew = change.from_weights.get(name, none) | change.stale.get(name, none)
    sources = {}
    for role in IN_USE:
        ways: list[tuple[Source, Tensor]] = [("from the weights", anew)] if role == "weight" else []
        ways += [(way, modules[name].roles[role].recorded_each) for way, modules in known if name in modules]
        ways += [("from other experts", roles[role].recorded_each), ("never recorded", torch.ones_like(none))]
        sources[role] = _sources(ways)
    return sources


def _sources(ways: Sequence[tuple[Source, Tensor]]) -> Counter[Source]:
    """How many GEMMs have a role from where: from the first way that is theirs, bool of the scale's shape."""
    counts: Counter[Source] = Counter()
    left = torch.ones_like(ways[0][1])
    for source, those in ways:
        counts[source] += int((those & left).sum())
        left &= ~those
    return counts


def _warm_up(run: Run) -> dict[str, Fp8State]:
    recorder = Recorder(run.recipe.precision, run.device, run.world)
    with run.model.recorded_by(recorder):
        for batch, targets in islice(run.upcoming(), run.recipe.train.warmup_passes):
            backward(run.model, batch, targets)
            run.model.zero_grad()
    return recorder.states()


def _counts(sources: Mapping[str, Mapping[Role, Counter[Source]]]) -> Mapping[Source, Mapping[Role, int]]:
    counted = {role: sum((roles[role] for roles in sources.values()), Counter[Source]()) for role in IN_USE}
    return {
        source: {role: counted[role][source] for role in IN_USE if counted[role][source]}
        for source in dict.fromkeys(source for role in IN_USE for source in counted[role])
    }


def _notes(change: StateChange, sources: Mapping[str, Mapping[Role, Counter[Source]]]) -> tuple[str, ...]:
    notes = [
        f"{name}: the carried weight amax does not fit the weights; it was taken from them" for name in change.stale
    ]
    for source, consequence in _SILENT.items():
        silent = [name for name, roles in sources.items() if any(counts[source] for counts in roles.values())]
        if silent:
            notes.append(f"{len(silent)} modules have {consequence}, e.g. {silent[0]}")
    return tuple(notes)


_SILENT: Mapping[Source, str] = {
    "from other experts": "experts that saw no token: they start with the largest amax of their layer's others",
    "never recorded": "a role that no warm-up pass recorded: scale 1",
}
