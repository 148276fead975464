"""The FP8 precision of the run that wrote a checkpoint, or of a recipe that is given in its place.

Where the checkpoint says it: a run of ours in its run.json, which a command's results have in their manifest, as long
as the weights are the same; Megatron's in its arguments; and one in delayed scaling in its FP8 state too.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.megatron.arguments import recipe_words
from precisionctl.checkpoints.megatron.directory import of_megatron
from precisionctl.checkpoints.megatron.keys import RUN_FILE
from precisionctl.checkpoints.run_file import ended_in_bf16, identity_of_run
from precisionctl.conversion import manifest
from precisionctl.conversion.known_state import KnownState
from precisionctl.conversion.manifest import RunOfWeights, run_in_manifest
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, RecipeError, UnknownArchitecture
from precisionctl.megatron_flags import coded_words, keys_of
from precisionctl.model.model_shape import ModelShape
from precisionctl.precision import EVERY_GEMM, PRESETS, Precision
from precisionctl.recipe import flat, recipe_of

_PRECISION = "precision."
_OF_ONE_RUN = ("precision.fp8", "precision.schedule")
"""Keys that another run does not take over: a command says the first, the second has shares of the run's own steps."""


@dataclass(frozen=True)
class RunPrecision:
    """The recipe keys (`precision.scaling`) that are known of an FP8 run, the precision that they make, and what says
    them. A run goes on in it from the checkpoint; `trained` is whether the last step of the one before was in it."""

    keys: Mapping[str, Any]
    precision: Precision
    said_by: str
    trained: bool = True


def precision_of_run(reader: Reader, weights_digest: str | None = None) -> RunPrecision | None:
    """What run.json says, or the manifest of these weights, or Megatron's arguments. None if none is there, if the run
    was in BF16, and for arguments of which no recipe can be made, such as another version of Megatron may have.
    `weights_digest` is that of the weights, if it has been taken. Raises DamagedCheckpoint and RecipeError for a
    `run.json` or a manifest that makes no sense."""
    if (identity := identity_of_run(reader)) is not None:
        keys = {key: value for key, value in identity.items() if key.startswith(_PRECISION)}
        if not keys.get("precision.fp8"):
            return None
        keys = {key: value for key, value in keys.items() if key not in _OF_ONE_RUN}
        return replace(_made(keys, str(RUN_FILE), reader.path), trained=not ended_in_bf16(reader))
    if (said := run_in_manifest(reader)) is not None and _is_of_weights(said, reader, weights_digest):
        return replace(_made(said.keys, str(manifest.RELATIVE), reader.path), trained=said.trained)
    if of_megatron(reader) and (given := keys_of(reader.args)):
        with suppress(RecipeError):
            return replace(_made(given, "Megatron's arguments"), trained=reader.trained_as_args)
    return None


def _is_of_weights(said: RunOfWeights, reader: Reader, weights_digest: str | None) -> bool:
    """Whether what a manifest says of a run holds of the weights: not if they were changed since, as by training."""
    with suppress(PrecisionctlError):  # if too much of the checkpoint is missing to tell
        return said.of_weights == (weights_digest or digest_weights(reader))
    return False


def outdated_precision(reader: Reader, weights_digest: str | None = None) -> tuple[str, ...]:
    """A note where the manifest says the precision of a run, and the weights were changed since. Arguments as of
    `precision_of_run`."""
    if identity_of_run(reader) is not None or (said := run_in_manifest(reader)) is None:
        return ()
    if _is_of_weights(said, reader, weights_digest):
        return ()
    return (f"{manifest.RELATIVE} says the precision of a run, of other weights than these: it is not used.",)


def precision_if_known(
    reader: Reader, weights_digest: str | None = None
) -> tuple[RunPrecision | None, tuple[str, ...]]:
    """As `precision_of_run`, for what can do without it; and notes where that is not known: where the run says it in
    words not known here, as one of another version may, or said it of other weights."""
    try:
        run, outdated = precision_of_run(reader, weights_digest), outdated_precision(reader, weights_digest)
    except (DamagedCheckpoint, RecipeError) as error:
        return None, (f"What precision the run was in is not known: {error.what}.",)
    return run, (*outdated, *(() if run else unknown_arguments(reader)))


def precision_of_recipe(recipe: Precision | None, model: ModelShape) -> Precision:
    """The precision of a recipe, or TE's defaults without one, for this model: it names the last layers that stay in
    BF16 (`Precision.of_layers`). Raises UnknownArchitecture for a recipe that counts the layers of a model that no
    table describes."""
    precision = recipe or PRESETS["fp8-delayed"]
    return precision.of_layers(model.num_layers) if precision.counts_layers else precision


def precision_of_export(
    recipe: Precision | None, run: Precision | None, model: ModelShape
) -> tuple[Precision, tuple[str, ...]]:
    """The precision that says which modules of an export stay in BF16: a given recipe, else that of the run that wrote
    the source. And a note where the run's numbers of layers cannot be heeded: no layer is left for FP8, or no table
    says which modules are layers."""
    if recipe is not None or run is None:
        return precision_of_recipe(recipe, model), ()
    by_name = replace(EVERY_GEMM, keep_bf16=run.keep_bf16)
    start, end = run.num_layers_at_start_in_bf16, run.num_layers_at_end_in_bf16
    by_number = replace(by_name, num_layers_at_start_in_bf16=start, num_layers_at_end_in_bf16=end)
    try:
        return precision_of_recipe(by_number, model), ()
    except (RecipeError, UnknownArchitecture) as error:
        return by_name, (f"What the run says of its first and last layers is not heeded: {error.what}.",)


def unknown_arguments(reader: Reader) -> tuple[str, ...]:
    """A note where Megatron's arguments say FP8 or FP4 of a run of which `precision_of_run` makes nothing."""
    if not of_megatron(reader) or identity_of_run(reader) is not None:
        return ()
    said = ", ".join(coded_words(reader.args))
    what = f"What precision the run was in is not known: no recipe can be made of Megatron's arguments {said}."
    return (what,) if said else ()


def precision_to_continue(reader: Reader, known: KnownState, *, state_given: bool) -> RunPrecision | None:
    """The precision in which a run goes on from a checkpoint: that of the run before, under delayed scaling with the
    settings of the usable state. State that the user has given means delayed scaling. Raises as `precision_of_run`."""
    before = precision_of_run(reader, known.weights_digest)
    delayed = before is not None and before.precision.keeps_state
    if known.recorded is None or not (before is None or delayed or state_given):
        return before
    keys = keys_of(recipe_words(known.recorded.recipe))
    if before and delayed:
        return _made({**before.keys, **keys}, f"{before.said_by} and the FP8 state")
    return _made(keys, "the FP8 state")


def settings_notes(before: RunPrecision, plain: Precision, taken: Precision) -> tuple[str, ...]:
    """A note on the settings of `taken`, from the run before, that differ from those of a `plain` precision, if any."""
    others, own = (flat({"precision": asdict(each)}) for each in (plain, taken))
    differing = ", ".join(f"{key} {value}" for key, value in own.items() if value != others[key])
    return (f"{taken.codes} settings from {before.said_by}: {differing}; --recipe gives others",) if differing else ()


def _made(keys: Mapping[str, Any], said_by: str, folder: Path | None = None) -> RunPrecision:
    """Raises RecipeError as `recipe_of`, and DamagedCheckpoint for other keys than those of a precision: a run that
    goes on takes them over, and would take its steps or its data from a stranger. `folder` is that of the file that
    says the keys."""
    file = (folder or Path()) / said_by
    # what `flat` gives has no tables, so a key within one is no run's
    tables = {key for key, value in keys.items() if isinstance(value, dict)}
    if others := [key for key in keys if key in tables or not key.startswith(_PRECISION) or key in _OF_ONE_RUN]:
        raise DamagedCheckpoint(f"`{others[0]}` among the settings of a run's precision", where=file)
    recipe = recipe_of({**keys, "precision.fp8": True}, file)
    return RunPrecision(keys, recipe.precision, said_by)
