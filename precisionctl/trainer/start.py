"""The FP8 state of a run's first step, role by role: never empty histories in silence.

State that the checkpoint carries is used. Else a weight's amax comes from the weight itself, and those of
activations and gradients from warm-up passes: forward and backward in BF16 over the coming micro-batches,
without an update and without consuming them, a history row each.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from precisionctl.cast import StateChange, fp8_state
from precisionctl.fp8.numerics import amax, change_recipe
from precisionctl.fp8.state import Fp8State, Fp8States, Role
from precisionctl.trainer.backend import Fp8Linear, fp8_linears
from precisionctl.trainer.loop import Run, backward
from precisionctl.trainer.recorder import Recorder

Source = Literal["carried", "from the weights", "warm-up", "never recorded"]

CALIBRATED = "precisionctl calibrate"
"""The producer of a state that calibration made."""

IN_USE: tuple[Role, ...] = ("input", "weight", "grad_output")
"""The roles that a linear casts; TE keeps `output` and `grad_input` beside them and never records them."""


@dataclass(frozen=True)
class Fp8Start:
    """What a run starts with: how many roles got their state from where, and the state that goes along unused,
    of modules which the run keeps in BF16."""

    counts: Mapping[Source, Mapping[Role, int]]
    carried: Fp8States | None
    notes: tuple[str, ...] = ()


def start_fp8(run: Run, found: Fp8States | None, aside: Fp8States | None, *, cold: bool) -> Fp8Start:
    """Set the state of every FP8 linear of the run's model from what is `found` in the checkpoint; `cold` is scale 1
    and empty histories everywhere, whatever is found. `aside` is what the checkpoint itself carried unused."""
    linears, recipe = fp8_linears(run.model), run.recipe.precision.delayed
    carried, left = _unused(found, aside, linears)
    if not linears:
        return Fp8Start({}, carried, left)
    if cold:
        for linear in linears.values():
            linear.set_fp8_state(Fp8State.fresh(recipe.amax_history_len))
        notes = ("cold start: scale 1 and empty histories everywhere",)
        return Fp8Start({_NEVER: dict.fromkeys(IN_USE, len(linears))}, None, notes)
    weights = {name: float(amax(run.model.get_parameter(f"{name}.weight"))) for name in linears}
    change = fp8_state(found, weights, recipe)
    known = change.states.modules
    missing = any(not known[name].roles[role].recorded for name in linears for role in IN_USE)
    warm = _warm_up(run) if missing else {}
    fresh = Fp8State.fresh(recipe.amax_history_len)
    sources = {name: _complete(name, linear, change, warm.get(name, fresh)) for name, linear in linears.items()}
    return Fp8Start(_counts(sources), carried, (*left, *_notes(change, sources)))


def start_collecting(run: Run, found: Fp8States | None) -> Fp8Start:
    """Let a BF16 run record what an FP8 run would; histories that were found go on, under the recipe of the run."""
    recipe = run.recipe.precision.delayed
    run.recorder = Recorder(replace(run.recipe.precision, fp8=True), run.device)
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
    return Fp8Start({"carried": dict.fromkeys(IN_USE, len(linears))} if linears else {}, carried)


def _unused(
    found: Fp8States | None, aside: Fp8States | None, linears: Mapping[str, Fp8Linear]
) -> tuple[Fp8States | None, tuple[str, ...]]:
    """What no linear takes up: of what was found, else of what was aside, for each has its own date and recipe.
    A note where something of both is left."""
    rests = [states.without(linears) for states in (found, aside) if states]
    kept = next((rest for rest in rests if rest.modules or rest.raw), None)
    left = [name for rest in rests for name in rest.modules if kept and name not in kept.modules]
    notes = (f"older FP8 state of {len(left)} modules is left behind, e.g. of {left[0]}",) if left else ()
    return kept, notes


_NEVER: Source = "never recorded"


def _complete(name: str, linear: Fp8Linear, change: StateChange, recorded: Fp8State) -> dict[Role, Source]:
    """Give a linear what is known of it, else what warm-up passes recorded. Returns where each role is from."""
    known = change.states.modules[name]
    roles = {role: part if part.recorded else recorded.roles[role] for role, part in known.roles.items()}
    linear.set_fp8_state(Fp8State(roles))
    sources: dict[Role, Source] = {}
    for role in IN_USE:
        warm: Source = "warm-up" if recorded.roles[role].recorded else _NEVER
        sources[role] = "carried" if known.roles[role].recorded else warm
    if name in change.from_weights or name in change.stale:
        sources["weight"] = "from the weights"
    return sources


def _warm_up(run: Run) -> Mapping[str, Fp8State]:
    recorder = Recorder(run.recipe.precision, run.device)
    with run.model.recorded_by(recorder):
        for batch, targets in islice(run.feed.coming(run.position), run.recipe.train.warmup_passes):
            backward(run.model, batch, targets)
            run.model.zero_grad()
    return recorder.states()


def _counts(sources: Mapping[str, Mapping[Role, Source]]) -> Mapping[Source, Mapping[Role, int]]:
    counted = Counter((source, role) for roles in sources.values() for role, source in roles.items())
    return {
        source: {role: counted[source, role] for role in IN_USE if counted[source, role]}
        for source in dict.fromkeys(source for source, _ in counted)
    }


def _notes(change: StateChange, sources: Mapping[str, Mapping[Role, Source]]) -> tuple[str, ...]:
    notes = [
        f"{name}: the carried weight amax does not fit the weights; it was taken from them" for name in change.stale
    ]
    silent = [name for name, roles in sources.items() if _NEVER in roles.values()]
    if silent:
        notes.append(f"{len(silent)} modules have a role that no warm-up pass recorded, e.g. {silent[0]}: scale 1")
    return tuple(notes)
