"""Whether a run's layers can be captured as CUDA graphs: what is replayed has one shape, and asks its host nothing."""

from collections.abc import Mapping

from precisionctl.errors import RecipeError
from precisionctl.model_shape import ModelShape
from precisionctl.recipe import Recipe
from precisionctl.trainer.backends.choose import BackendName
from precisionctl.trainer.data import Blend, Rows
from precisionctl.trainer.parallel.world import are_cut


def check(recipe: Recipe, model: ModelShape, backend: BackendName, ranks: int) -> None:
    """Raise RecipeError, with the reason, for a run of so many ranks whose `train.graphs` cannot be had."""
    reasons = {
        "Transformer Engine captures them on a GPU, and this run is emulated": backend != "te",
        "ranks put parameters together for each pass": are_cut(ranks, recipe),
        "how large an expert's GEMM is, the host is told in each pass": model.moe is not None,
        "train.recompute computes layers once more outside of them": recipe.train.recompute != "none",
    }
    _refuse(recipe, reasons)


def check_rows(recipe: Recipe, rows: Rows | Blend) -> None:
    """Raise RecipeError, with the reason, for data over which they cannot be had."""
    reason = "rows of conversations, and texts that share rows, have another shape in each pass"
    _refuse(recipe, {reason: not rows.is_even})


def _refuse(recipe: Recipe, reasons: Mapping[str, bool]) -> None:
    found = [reason for reason, is_so in reasons.items() if is_so]
    if recipe.train.graphs and found:
        raise RecipeError(f"train.graphs asks for CUDA graphs of the layers, but {found[0]}", do="Leave it out.")
