"""Which FP8 state the roles of a checkpoint have: the one answer, for every command.

First, what an explicit file says. Then, what was recorded with exactly the weights that the checkpoint has. Whatever
else there is was recorded with other weights: it is carried, and used for nothing. All activations and gradients of a
model depend on all of its weights, so state is of these weights as a whole, or not at all.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from pathlib import Path

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.encodings_file import WeightEncodings
from precisionctl.checkpoints.megatron.carried_run import of_megatron
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.fp8.carry import check_modules, merged, read_state, under_recipe
from precisionctl.fp8.state import DelayedScaling, Fp8States

NOT_KNOWN = ""
"""The digest of state that is of none of the weights that anybody has: with it a state is used no more."""


@dataclass(frozen=True)
class KnownState:
    """The FP8 state of a checkpoint. `usable` is what a file that the user names has, and what is of the checkpoint's
    weights: of each role the first that recorded it. `outdated` is the checkpoint's own, recorded with other weights.
    `notes` say what was replaced. `of_weights` is the digest of the checkpoint's weights, where there is any state."""

    usable: tuple[Fp8States, ...] = ()
    outdated: Fp8States | None = None
    notes: tuple[str, ...] = ()
    of_weights: str | None = None

    @cached_property
    def current(self) -> Fp8States | None:
        """What may be used as one state, under the recipe of the first."""
        return reduce(merged, self.usable) if self.usable else None

    @property
    def why_none(self) -> str:
        """Why there is no `current` state."""
        return outdated_words(self.outdated) if self.outdated else "the checkpoint holds no FP8 state"


def known_state(
    reader: Reader,
    gemms: Mapping[str, tuple[int, ...]],
    file: Path | None = None,
    recipe: DelayedScaling | None = None,
    *,
    drop: bool = False,
) -> KnownState:
    """What is known of the FP8 `gemms` (`Plan.gemms`) of an open checkpoint, under `recipe` if one is given, else under
    the checkpoint's own. `file` is what --fp8-state names; `drop` passes over the checkpoint's own.

    Raises MappingError for state of another model, and what reading raises.
    """
    own, given = None if drop else reader.fp8, read_state(file, gemms) if file else None
    if own is not None:
        check_modules(own, gemms)
    if own is None and given is None:
        return KnownState()
    digest = digest_weights(reader)
    current = replace(own, of_weights=digest) if own and is_of_weights(own, digest, reader) else None
    notes = tuple(_file_notes(file, given, current, digest)) if file and given else ()
    usable = [states for states in (given, current) if states]
    if usable:  # the checkpoint's own recipe, where it has state that is usable, and no recorded row cut off
        rows = max(each.recipe.amax_history_len for each in usable)
        new = recipe or replace(usable[-1].recipe, amax_history_len=rows)
        usable = [replace(each, recipe=new, modules=under_recipe(new, each)) for each in usable]
    return KnownState(tuple(usable), own if current is None else None, notes, digest)


def is_of_weights(states: Fp8States, digest: str, reader: Reader) -> bool:
    """Whether state that a checkpoint holds was recorded with the weights that it holds, which have this digest.

    State without one is another program's, in a Megatron checkpoint: then both are of one iteration.
    """
    if states.of_weights is not None:
        return states.of_weights == digest
    return of_megatron(reader) and states.iteration == reader.iteration


def fixed_scales_hold(reader: Reader, encodings: WeightEncodings) -> bool:
    """Whether the fixed scales of inputs and caches that a checkpoint's codes came with are of the weights that it has:
    it still has the codes, or what they decode to."""
    return bool(reader.encodings) or encodings.of_weights == digest_weights(reader)


def origin(states: Fp8States) -> str:
    """Who recorded it and when, in a few words."""
    when = "" if states.iteration is None else f"iteration {states.iteration}"
    return ", ".join(filter(None, [states.producer, when])) or "of unknown origin"


def outdated_words(states: Fp8States) -> str:
    """Why a checkpoint's own state is of no use, as a clause."""
    unknown = "does not say with which weights it was recorded"
    why = unknown if states.of_weights is None else "was recorded with other weights"
    return f"the checkpoint's FP8 state ({origin(states)}) {why}"


def outdated_note(states: Fp8States, what: str) -> str:
    """The same as a note: `what` becomes of it, and what helps."""
    words = outdated_words(states)
    return f"{words[0].upper()}{words[1:]}: {what}. `precisionctl calibrate` records it anew."


def _file_notes(file: Path, given: Fp8States, own: Fp8States | None, digest: str) -> Iterator[str]:
    if given.of_weights is None:
        yield f"{file} does not say with which weights its FP8 state was recorded; it is used as it is."
    elif given.of_weights != digest:
        yield f"WARNING: the FP8 state in {file} was recorded with other weights than these; it is used all the same."
    both = own.modules.keys() & given.modules.keys() if own else ()
    instead = f", not the checkpoint's own ({origin(own)})" if own and both else ""
    yield f"The FP8 state of {len(given.modules)} modules is that of {file}{instead}."
