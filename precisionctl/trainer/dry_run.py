"""What `resume` would do, without doing any of it: nothing is written, no data and no weights are read."""

from dataclasses import dataclass
from pathlib import Path

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.planning.make_plan import make_plan
from precisionctl.recipe import Recipe
from precisionctl.trainer.backends.choose import BackendName, choose_backend
from precisionctl.trainer.measure.preflight import Preflight, look_ahead
from precisionctl.trainer.parallel import shares
from precisionctl.trainer.parallel.world import check, together
from precisionctl.trainer.saved import parts, run_folder
from precisionctl.trainer.saved.parts import Load
from precisionctl.trainer.settings import Settings, check_length, read_recipe


@dataclass(frozen=True)
class Planned:
    """What a run would be. `going_on` where its folder has an iteration already, at `step`. Of several ranks the first
    one `speaks`."""

    recipe: Recipe
    out: Path
    step: int
    going_on: bool
    load: Load
    backend: BackendName
    ahead: Preflight
    speaks: bool


def plan_run(settings: Settings) -> Planned:
    """Raises what `resume` would before its first step, but for what data and tensors are to blame."""
    with together() as ranks:
        recipe = read_recipe(settings)
        check(ranks.count, recipe)
        source = open_checkpoint(settings.checkpoint)
        load, skipped = parts.left(source, settings.load, settings.skip)
        model = make_plan(source, "megatron").model
        check_length(recipe, model)
        backend = choose_backend(settings.backend, recipe.precision)
        shares.check(model, recipe.parallel)
        here = run_folder.newest(settings.folder) if settings.folder.is_dir() else None
        begins_at = 0 if "schedule" in skipped else source.iteration or 0
        step = begins_at if here is None else here.iteration or 0
        ahead = look_ahead(model, recipe, backend, ranks.count)
        return Planned(recipe, settings.folder, step, here is not None, load, backend, ahead, ranks.first)
