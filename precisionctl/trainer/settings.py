"""The settings of a run from the command line, and the recipe and data that they name."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from precisionctl.codes.statistics import FP8_SCALINGS
from precisionctl.errors import RecipeError
from precisionctl.model.model_shape import ModelShape
from precisionctl.paths import StrPath
from precisionctl.precision import PrecisionOption
from precisionctl.recipe import Data, Recipe, load_recipe
from precisionctl.tokens.tokenizer import Tokenizer
from precisionctl.trainer.data import Blend, OnTokens, Rows, load_data
from precisionctl.trainer.data.rows import check_path
from precisionctl.trainer.measure.tracking import require
from precisionctl.trainer.model.computes import longest_text
from precisionctl.trainer.saved.loading import Load, StatePart


@dataclass(frozen=True)
class Settings:
    """The options of `resume`. `load` None means full if the checkpoint has an optimizer. `skip` are the parts that are
    not loaded. `reference` has the config and tokenizer of a checkpoint that has none."""

    checkpoint: Path
    precision: PrecisionOption
    data: StrPath | None = None
    out: Path | None = None
    recipe: str | None = None
    overrides: tuple[str, ...] = ()
    load: Load | None = None
    skip: tuple[StatePart, ...] = ()
    reference: Path | None = None
    backend: Literal["auto", "te", "emulated"] = "auto"
    cold_start: bool = False
    collect_amax: bool = False
    fp8_state: Path | None = None
    shadow_every: int | None = None
    time_limit: timedelta | None = None

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.out or Path(f"{self.checkpoint.resolve().name}-{self.precision}")

    @property
    def start(self) -> Mapping[str, object]:
        """The part of a run's identity besides checkpoint, data and recipe."""
        start: dict[str, object] = {"cold_start": self.cold_start}
        if self.skip:
            start["skip"] = sorted(set(self.skip))
        if self.collect_amax:
            start["collect_amax"] = True
        if self.fp8_state:
            with open(self.fp8_state, "rb") as file:
                start["fp8_state"] = hashlib.file_digest(file, "sha256").hexdigest()
        return start


def read_recipe(settings: Settings, known: Mapping[str, Any] = MappingProxyType({})) -> Recipe:
    """The recipe with the command line's overrides; if none is named, the plain one of the precision. `known` are keys
    with values that count before the recipe's, and after the command line's. Raises RecipeError for settings that
    contradict each other or the recipe, DataError for data that is not there: both are known before anything large is
    read."""
    name = settings.recipe or {"bf16": "bf16", "fp8": "fp8-delayed", "nvfp4": "nvfp4"}[settings.precision]
    recipe = load_recipe(name, settings.overrides, known)
    recipe = replace(recipe, precision=replace(recipe.precision, fp8=settings.precision != "bf16"))
    precision = recipe.precision
    if settings.precision != precision.option:
        others = "nvfp4" if settings.precision == "nvfp4" else " or ".join(FP8_SCALINGS)
        raise RecipeError(
            f"--precision {settings.precision}, but precision.scaling = {precision.scaling} is {precision.codes}",
            do=f"Give --precision {precision.option}, or --set precision.scaling={others}.",
        )
    if settings.shadow_every is not None:
        recipe = replace(recipe, guard=replace(recipe.guard, shadow_every=settings.shadow_every))
    if not precision.fp8 and is_guarded(recipe):
        raise RecipeError(
            "a guard and precision.schedule need a run in FP8 or NVFP4, and this one is in BF16",
            do="Give --precision fp8 or nvfp4, or leave out --shadow-every, guard.shadow_every, guard.jump_at and "
            "precision.schedule.",
        )
    stateful = precision.keeps_state
    options = {"--cold-start empties": settings.cold_start, "--fp8-state is": settings.fp8_state}
    if not stateful and (given := [what for what, value in options.items() if value]):
        raise RecipeError(
            f"{given[0]} the state of delayed scaling, and this run keeps none",
            do="Leave it out, or train in FP8 with precision.scaling=delayed.",
        )
    if settings.cold_start and settings.fp8_state:
        raise RecipeError(
            "--cold-start starts without FP8 state, and --fp8-state gives one", do="Leave one of them out."
        )
    if precision.delayed.fp8_dpa or precision.delayed.fp8_mha:
        raise RecipeError(
            "precision.delayed.fp8_dpa and fp8_mha put attention into FP8, which is not supported here",
            do="Leave them out.",
        )
    require(recipe.tracking)
    if settings.collect_amax and precision.fp8:
        why = (
            "delayed scaling records amaxes anyway" if stateful else "this run's scaling takes its own, and keeps none"
        )
        raise RecipeError(
            f"--collect-amax is for BF16 runs, and this one is in {precision.codes}",
            do=f"Leave --collect-amax out: {why}.",
        )
    recipe = with_data(recipe, settings.data)
    if recipe.data.held_out:
        check_path(recipe.data.held_out)
    return recipe


def is_guarded(recipe: Recipe) -> bool:
    """Whether the run has a guard or a precision schedule, so that the precision of steps is decided as it runs."""
    return bool(recipe.guard.shadow_every or recipe.guard.jump_at or recipe.precision.schedule)


def with_data(recipe: Recipe, data: StrPath | None) -> Recipe:
    """The recipe with the data that the command line names, if any. Raises RecipeError if neither names data,
    DataError if there is none where one of them says."""
    if data:
        recipe = replace(recipe, data=replace(recipe.data, path=str(data), blend=()))
    if not (recipe.data.path or recipe.data.blend):
        raise RecipeError("no data to train on", do="Give --data PATH, or data.path or data.blend in the recipe.")
    for path in recipe.data.paths:
        check_path(path)
    return recipe


def tokenized_rows(
    data: Data,
    tokenizer: Tokenizer,
    model: ModelShape,
    cache: Path | None = None,
    on_tokens: OnTokens = lambda count: None,
) -> Rows | Blend:
    """Tokenize a recipe's data, or read its tokens from `data.cache` (else `cache`), where they are kept. Raises
    DataError for data that cannot be read, or with tokens that the model does not have."""
    rows = load_data(data, tokenizer, Path(data.cache) if data.cache else cache, on_tokens)
    rows.require_vocabulary(model.vocab_size)
    return rows


def check_length(recipe: Recipe, model: ModelShape, option: str = "--set data.sequence_length=") -> None:
    """Raise RecipeError for rows longer than the model's positions, or than the keys that sparse attention chooses.
    `option` is how the length is given."""
    longest = longest_text(model)
    if recipe.data.sequence_length > longest:
        whole = longest == model.max_position_embeddings
        of_what = "the model's" if whole else "what the trainer computes of sparse attention:"
        raise RecipeError(
            f"data.sequence_length {recipe.data.sequence_length} is beyond {of_what} {longest}",
            do=f"Give {option}{longest}.",
        )
