"""Which FP8 state may be used for a checkpoint: the one answer, for every command.

For each role, first the state in a file that the user names, then state that was recorded with exactly the checkpoint's
weights. Other state was recorded with other weights: it is carried along and not used. As activations and gradients
depend on all weights, state is valid for a model as a whole or not at all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from pathlib import Path

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.megatron.directory import of_megatron
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.fp8.carry import check_modules, filled_in, read_state, under_recipe
from precisionctl.fp8.state import DelayedScaling, Fp8States
from precisionctl.sizes import counted

NOT_KNOWN = ""
"""A digest that no weights have: state with it is never used again."""


@dataclass(frozen=True)
class KnownState:
    """The FP8 state of a checkpoint.

    `usable` are the state of the user's file and the checkpoint's own, if it was recorded with its weights; each role
    is taken from the first that recorded it. `outdated` is the checkpoint's own state if it was recorded with other
    weights. `recorded` is the usable state of GEMMs under the recipe that it was recorded with: the checkpoint's own,
    else the file's. `notes` say what was replaced. `weights_digest` is that of the checkpoint's weights, taken if there
    is any state.
    """

    usable: tuple[Fp8States, ...] = ()
    outdated: Fp8States | None = None
    recorded: Fp8States | None = None
    notes: tuple[str, ...] = ()
    weights_digest: str | None = None

    @cached_property
    def current(self) -> Fp8States | None:
        """The first usable state, filled in from the others; None if there are none."""
        return reduce(filled_in, self.usable) if self.usable else None

    @property
    def why_none(self) -> str:
        """Why there is no `current` state."""
        return outdated_words(self.outdated) if self.outdated else "the checkpoint has no FP8 state"


def known_state(
    reader: Reader,
    gemms: Mapping[str, tuple[int, ...]],
    file: Path | None,
    recipe: DelayedScaling | None = None,
    *,
    drop: bool = False,
    weights_digest: str | None = None,
) -> KnownState:
    """The known state of the FP8 `gemms` (`Plan.gemms`) of an open checkpoint, under `recipe` if given, else under the
    checkpoint's own. `file` is that of --fp8-state; `drop` ignores the checkpoint's own state; `weights_digest` is
    that of the weights, if it has been taken.

    Raises MappingError for state of another model, and as `sidecar.read` and `Reader.fp8`.
    """
    own, given = None if drop else reader.fp8, read_state(file, gemms) if file else None
    if own is not None:
        check_modules(own, gemms)
    if own is None and given is None:
        return KnownState()
    digest = weights_digest or digest_weights(reader)
    current = replace(own, of_weights=digest) if own and is_of_weights(own, digest, reader) else None

    notes = list[str]()
    if given:
        if given.of_weights is None:  # the user says whose it is
            notes.append(f"{file} does not say with which weights its FP8 state was recorded; it is taken to be these.")
            given = replace(given, of_weights=digest)
        elif given.of_weights != digest:
            notes.append(
                f"WARNING: the FP8 state in {file} was recorded with other weights than these; it is used anyway. A "
                "checkpoint that it is written to keeps that mark: later commands need --fp8-state again."
            )
        both = current.modules.keys() & given.modules.keys() if current else ()
        instead = f", not the checkpoint's own ({origin(current)})" if current and both else ""
        notes.append(f"The FP8 state of {counted(len(given.modules), 'module')} is taken from {file}{instead}.")

    usable = [states for states in (given, current) if states]
    recorded = next((states for states in reversed(usable) if states.of_gemms), None)
    if usable:  # the checkpoint's own recipe, if its state is usable, with histories long enough for all rows
        rows = max(each.recipe.amax_history_len for each in usable)
        new = recipe or replace(usable[-1].recipe, amax_history_len=rows)
        usable = [replace(each, recipe=new, modules=under_recipe(new, each)) for each in usable]
    return KnownState(tuple(usable), own if current is None else None, recorded, tuple(notes), digest)


def is_of_weights(states: Fp8States, digest: str, reader: Reader) -> bool:
    """Whether a checkpoint's state was recorded with its weights, which have this digest.

    State without a digest was written by another program; in a Megatron checkpoint it belongs to the weights of the
    same iteration.
    """
    if states.of_weights is not None:
        return states.of_weights == digest
    return of_megatron(reader) and states.iteration == reader.iteration


def origin(states: Fp8States) -> str:
    """Who recorded a state, and at which iteration, in a few words."""
    when = "" if states.iteration is None else f"iteration {states.iteration}"
    return ", ".join(filter(None, [states.producer, when])) or "of unknown origin"


def why_outdated(states: Fp8States) -> str:
    """Why a checkpoint's own state is not used, in words that go on after "it"."""
    unknown = "does not say with which weights it was recorded"
    return unknown if states.of_weights is None else "was recorded with other weights"


def outdated_words(states: Fp8States) -> str:
    """A clause that says why a checkpoint's own state is not used."""
    return f"the checkpoint's FP8 state ({origin(states)}) {why_outdated(states)}"


def outdated_note(states: Fp8States, what: str) -> str:
    """`outdated_words` as a note: `what` happens to the state, and how to record it anew."""
    words = outdated_words(states)
    return f"{words[0].upper()}{words[1:]}: {what}. `precisionctl calibrate` records it anew."
