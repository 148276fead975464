"""A source opened with what the command tells of it: the family of a plain Megatron checkpoint, and its tokenizer."""

from pathlib import Path

from precisionctl.checkpoints.base import Companions, Reader
from precisionctl.checkpoints.companions import read_companions
from precisionctl.checkpoints.megatron.carried_run import of_megatron
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import DamagedCheckpoint, RecipeError
from precisionctl.fp8.grouped import ColumnOrder


def open_source(
    source: Path,
    iteration: int | None,
    *,
    architecture: str | None,
    reference: Path | None,
    grouped_columns: ColumnOrder | None = None,
) -> Reader:
    """Open a source. `architecture` names its family, or `reference` a Hugging Face directory of the same model, whose
    config and tokenizer it gets (weights need not be there); `grouped_columns` the order of experts' payloads that do
    not tell it.

    Raises RecipeError where the checkpoint says that by itself, and what opening raises.
    """
    reader = open_checkpoint(source, iteration)
    if grouped_columns is not None:
        if not of_megatron(reader):
            raise RecipeError("the source has no payloads of Transformer Engine", do="Leave --grouped-columns out.")
        reader.grouped_columns = grouped_columns
    if architecture is None and reference is None:
        return reader
    if not of_megatron(reader) or reader.companions.files:
        raise RecipeError(
            "the checkpoint has a config.json, which says what it is", do="Leave --architecture and --reference out."
        )
    reader.family = architecture
    if reference is not None:
        reader.companions = _companions_of(reference)
        try:
            _ = reader.model
        except DamagedCheckpoint as error:
            raise RecipeError(
                f"the reference is of another model: {error.what}", where=reference, do="Give another one."
            ) from error
    return reader


def _companions_of(reference: Path) -> Companions:
    """Config and tokenizer of a directory, or of a Megatron checkpoint that has them. Raises RecipeError for one that
    has none."""
    if (reference / "config.json").is_file():
        return read_companions(reference)
    companions = open_checkpoint(reference).companions
    if "config.json" not in companions.files:
        raise RecipeError("the reference has no config.json", where=reference, do="Give a Hugging Face directory.")
    return companions
