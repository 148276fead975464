"""The FP8 state of a run's first step, for each role. A role that nothing recorded is always reported.

Each role is taken from the first of these that recorded it: the file that the command names; the checkpoint's state,
from FP8 training or collected in BF16 training, if it is of the checkpoint's weights; warm-up passes. These are forward
and backward passes in BF16 over the coming micro-batches, without an update and without consuming them; each fills one
row of the history. The amax of a weight that none recorded, or not as it is now, is computed from the weight. An expert
that has seen no token starts with the largest amax of the other experts in its layer.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from precisionctl.codes.numerics import amax
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
from precisionctl.fp8.state import (
    BY_RECORDER,
    BY_RECORDER_IN_TRANSFORMERS,
    CALIBRATED,
    COLLECTED,
    IN_USE,
    Fp8State,
    Fp8States,
    Role,
)
from precisionctl.sizes import counted
from precisionctl.trainer.backends.base import Fp8Linear, fp8_linears
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.parallel.world import local
from precisionctl.trainer.passes import recording_pass
from precisionctl.trainer.run import Run

StateOrigin = Literal[
    "carried",
    "collected in BF16 training",
    "calibrated",
    "warm-up",
    "from the weights",
    "from other experts",
    "never recorded",
]

Known = tuple[StateOrigin, Mapping[str, Fp8State]]
"""States by module, with their origin. Several stand in the order of preference."""

_PRODUCERS: Mapping[str, StateOrigin] = {
    COLLECTED: "collected in BF16 training",
    CALIBRATED: "calibrated",
    BY_RECORDER: "calibrated",
    BY_RECORDER_IN_TRANSFORMERS: "calibrated",
}


@dataclass(frozen=True)
class Fp8Start:
    """The FP8 state that a run starts with. `counts` is the number of GEMMs by the origin of their state and by role;
    each expert has a GEMM of its own. `carried` is state of modules that the run keeps in BF16: it is not used, but
    saved again."""

    counts: Mapping[StateOrigin, Mapping[Role, int]]
    carried: Fp8States | None
    notes: tuple[str, ...] = ()


def start_fp8(run: Run, state: KnownState, sidecar_state: Fp8States | None, *, cold: bool) -> Fp8Start:
    """Set the FP8 state of every linear of the run's model, from the usable part of the known `state`; with `cold`,
    scale 1 and empty histories everywhere. `sidecar_state` is what the checkpoint itself carried along unused. Raises
    MappingError for state of another number of experts."""
    linears, recipe = fp8_linears(run.model), run.recipe.precision.delayed
    carried, left = unused(state, sidecar_state, linears)
    if not linears:
        return Fp8Start({}, carried, left)
    shapes = {name: _shape(linear) for name, linear in linears.items()}
    fresh = {name: Fp8State.fresh(recipe.amax_history_len, shape) for name, shape in shapes.items()}
    if cold:
        for name, linear in linears.items():
            linear.set_fp8_state(fresh[name])
        notes = ("cold start: scale 1 and empty histories everywhere",)
        return Fp8Start({"never recorded": _all_gemms(linears)}, None, notes)

    known: list[Known] = []
    for states in state.usable:
        mine = replace(states, modules={name: each for name, each in states.modules.items() if name in shapes})
        check_modules(mine, shapes)
        known.append((_PRODUCERS.get(states.producer, "carried"), under_recipe(recipe, mine)))
    first = {
        name: first_recorded([*(modules[name] for _, modules in known if name in modules), fresh[name]])
        for name in linears
    }
    activations = [role for role in IN_USE if role != "weight"]
    if not all(bool(each.roles[role].recorded_each.all()) for each in first.values() for role in activations):
        recorder = Recorder(run.recipe.precision, run.device, run.world)
        with run.model.recorded_by(recorder):
            for batch, targets in islice(run.feed.upcoming(run.position), run.recipe.train.warmup_passes):
                recording_pass(run.model, batch, targets)
        recorded = recorder.states()
        known.append(("warm-up", recorded))
        first = {name: first_recorded([each, recorded.get(name, fresh[name])]) for name, each in first.items()}

    change = carry_state(Fp8States(recipe, first), amax_by_module(_weight_amax(run, linears), shapes), recipe)
    sources = {name: _complete(name, linear, change, known) for name, linear in linears.items()}
    counts: dict[StateOrigin, dict[Role, int]] = {}
    for role in IN_USE:
        for origin, number in sum((roles[role] for roles in sources.values()), Counter[StateOrigin]()).items():
            counts.setdefault(origin, {})[role] = number
    return Fp8Start(counts, carried, (*left, *_notes(state, change, sources)))


def start_collecting(run: Run, found: Fp8States | None) -> Fp8Start:
    """Let a BF16 run record the amaxes that an FP8 run would. The histories in `found` are continued under the run's
    recipe."""
    recipe = run.recipe.precision.delayed
    run.recorder = Recorder(replace(run.recipe.precision, fp8=True), run.device, run.world)
    if found:
        run.recorder.load(under_recipe(recipe, found))
    notes = ("amaxes are collected: each pass is a row of the histories in the checkpoints' sidecar",)
    return Fp8Start({}, found, notes)


def continue_fp8(run: Run, saved: Fp8States | None, carried: Fp8States | None) -> Fp8Start:
    """Set the state that the run itself has saved, unchanged."""
    linears = fp8_linears(run.model)
    for name, linear in linears.items():
        assert saved is not None, "an FP8 run with linears that keep state saves it"
        linear.set_fp8_state(saved.modules[name])
    return Fp8Start({"carried": _all_gemms(linears)} if linears else {}, carried)


FC2_OF_EXPERTS = "the first steps may saturate: inputs of experts' linear_fc2 were recorded"


def _shape(linear: Fp8Linear) -> tuple[int, ...]:
    """The shape of a linear's scales: `[]`, or `[experts]`."""
    state = linear.fp8_state()
    assert state is not None, "fp8_linears lists the linears that keep state"
    return state.shape


def _all_gemms(linears: Mapping[str, Fp8Linear]) -> Mapping[Role, int]:
    return dict.fromkeys(IN_USE, sum(math.prod(_shape(linear)) for linear in linears.values()))


def _weight_amax(run: Run, linears: Mapping[str, Fp8Linear]) -> dict[str, float]:
    """The amax of each FP8 weight, over all ranks, by name."""
    split = ((name, *name.rpartition(".")[::2]) for name in run.model.shards.tensors)
    weights = [name for name, module, leaf in split if module in linears and leaf.startswith("weight")]
    if not weights:
        return {}
    here, none = run.optimizer.parameters, torch.zeros((), device=run.device)  # 0 for an expert of another rank
    mine = torch.stack(
        [amax(local(here[name]).to(run.model.backend.dtype)) if name in here else none for name in weights]
    )
    return dict(zip(weights, run.world.all_reduce_max(mine).tolist(), strict=True))


def unused(
    state: KnownState, sidecar_state: Fp8States | None, linears: Collection[str]
) -> tuple[Fp8States | None, tuple[str, ...]]:
    """The state of modules that are not among the run's FP8 `linears`, which the run carries along. It is taken from
    the first source that has any: states have their own step and recipe, so they cannot be mixed. Also a note if other
    state is left behind."""
    rests = [states.without(linears) for states in (*state.usable, state.outdated, sidecar_state) if states]
    kept = next((rest for rest in rests if rest.modules or rest.raw), None)
    left = [name for rest in rests for name in rest.modules if kept and name not in kept.modules]
    notes = (f"older FP8 state of {counted(len(left), 'module')} is left behind, e.g. of {left[0]}",) if left else ()
    return kept, notes


def _complete(
    name: str, linear: Fp8Linear, change: StateChange, known: Sequence[Known]
) -> dict[Role, Counter[StateOrigin]]:
    """Set a linear's state, in which experts without tokens get the other experts'. Returns, for each role, the number
    of the linear's GEMMs by the origin of their state."""
    state = change.states.modules[name]
    roles = dict(state.roles)
    roles |= {role: from_other_experts(roles[role], role, change.states.recipe) for role in IN_USE}
    linear.set_fp8_state(Fp8State(roles))
    none = torch.zeros(state.shape, dtype=torch.bool)
    anew = change.from_weights.get(name, none) | change.stale.get(name, none)
    sources = {}
    for role in IN_USE:
        ways: list[tuple[StateOrigin, Tensor]] = [("from the weights", anew)] if role == "weight" else []
        ways += [(way, modules[name].roles[role].recorded_each) for way, modules in known if name in modules]
        ways += [("from other experts", roles[role].recorded_each), ("never recorded", torch.ones_like(none))]
        counts: Counter[StateOrigin] = Counter()
        left = torch.ones_like(none)  # the experts that no earlier way has
        for source, has in ways:
            counts[source] += int((has & left).sum())
            left &= ~has
        sources[role] = counts
    return sources


def _notes(
    state: KnownState, change: StateChange, sources: Mapping[str, Mapping[Role, Counter[StateOrigin]]]
) -> Iterator[str]:
    """What a run does otherwise than the one whose state it starts with, and which state is not as it was recorded."""
    if any(states.has_router_weights for states in state.usable):
        yield f"{FC2_OF_EXPERTS} after multiplication by the router's weights; this trainer multiplies later"
    recorded, recipe = state.recorded, change.states.recipe
    if recorded and recorded.producer not in _PRODUCERS and (other := recorded.recipe) != recipe:
        keys = [key for key in vars(recipe) if getattr(other, key) != getattr(recipe, key)]
        theirs, mine = (", ".join(f"{key} {getattr(each, key)}" for key in keys) for each in (other, recipe))
        yield f"the FP8 state is of a run with {theirs}; this recipe has {mine} (--set precision.delayed.KEY=VALUE)"
    for name in change.stale:
        yield f"{name}: the carried weight amax does not fit the weights; it was computed from them"
    for source, consequence in _INCOMPLETE.items():
        modules = [name for name, roles in sources.items() if any(counts[source] for counts in roles.values())]
        if modules:
            yield f"{counted(len(modules), 'module has', 'modules have')} {consequence}, e.g. {modules[0]}"


_INCOMPLETE: Mapping[StateOrigin, str] = {
    "from other experts": "experts that saw no token: they start with the largest amax of their layer's others",
    "never recorded": "a role that no warm-up pass recorded: scale 1",
}
