"""What `resume` would do, without doing any of it: nothing is written, no data and no weights are read."""

from dataclasses import dataclass
from pathlib import Path

from precisionctl.tokens.tokenizer import open_tokenizer
from precisionctl.trainer.data.rows import check_there
from precisionctl.trainer.measure.preflight import Preflight, look_ahead
from precisionctl.trainer.parallel.world import together
from precisionctl.trainer.run_plan import RunPlan, plan_run
from precisionctl.trainer.saved import parts, run_folder
from precisionctl.trainer.saved.room import Room, checkpoint_bytes, room_of
from precisionctl.trainer.settings import Settings, read_recipe


@dataclass(frozen=True)
class DryRun:
    """What a run would be. `going_on` where its folder has an iteration already, at `step`. Of several ranks the first
    one `speaks`."""

    plan: RunPlan
    step: int
    going_on: bool
    ahead: Preflight
    room: Room
    speaks: bool


def dry_run(settings: Settings) -> DryRun:
    """Raises what `resume` would before its first step, but for what is in the data and in tensors."""
    with together() as ranks:
        plan = plan_run(settings, read_recipe(settings), ranks.count)
        _check_data(plan)
        saved = _going_on(plan)
        steps = plan.recipe.train.steps
        step = saved.step if saved else parts.first_step(plan.source, plan.skipped, steps)
        ahead = look_ahead(plan.model, plan.recipe, plan.backend, ranks.count)
        room = room_of(checkpoint_bytes(plan.source), plan.recipe.train, plan.out)
        return DryRun(plan, step, saved is not None, ahead, room, ranks.first)


def _check_data(plan: RunPlan) -> None:
    """Raise DataError for a checkpoint without a tokenizer, and for data that is not there."""
    with open_tokenizer(plan.source.companions) as tokenizer:
        tokenizer.check()
        for data in filter(None, (plan.recipe.data, plan.held_out)):
            for path in [share.path for share in data.blend] or [data.path]:
                check_there(Path(path), tokenizer)


def _going_on(plan: RunPlan) -> run_folder.Saved | None:
    """The run that is in the folder. Raises OutputError where that is another one, as far as can be told without its
    data."""
    newest = run_folder.newest(plan.out)
    saved = run_folder.read_saved(newest) if newest else None
    if saved:
        run_folder.check_same(saved, plan.identity_with(saved.identity["data"]), plan.out)
    return saved
