"""Whether a run's layers can be captured as CUDA graphs: what is replayed has one shape, and asks its host nothing."""

from precisionctl.errors import RecipeError
from precisionctl.model_shape import ModelShape
from precisionctl.recipe import Recipe
from precisionctl.trainer.backends.choose import BackendName
from precisionctl.trainer.data import Blend, Rows
from precisionctl.trainer.parallel.world import World


def check(recipe: Recipe, model: ModelShape, backend: BackendName, world: World, rows: Rows | Blend) -> None:
    """Raise RecipeError, with the reason, for a run whose `train.graphs` cannot be had."""
    if not recipe.train.graphs:
        return
    reasons = {
        "Transformer Engine captures them on a GPU, and this run is emulated": backend != "te",
        "ranks put parameters together for each pass": world.cuts,
        "how large an expert's GEMM is, the host is told in each pass": model.moe is not None,
        "train.recompute computes layers once more outside of them": recipe.train.recompute != "none",
        "rows of conversations, and texts that share rows, have another shape in each pass": not rows.is_even,
    }
    if found := [reason for reason, is_so in reasons.items() if is_so]:
        raise RecipeError(f"train.graphs asks for CUDA graphs of the layers, but {found[0]}", do="Leave it out.")
