"""A run as it is planned: what it is asked and what it starts from, held against one another before data and tensors
are read. `resume` begins here, and `--dry-run` looks no further."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.conversion.known_state import KnownState, known_state
from precisionctl.model_shape import ModelShape
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Plan, check_fp8_gemms
from precisionctl.recipe import Data, Recipe
from precisionctl.trainer import graphs
from precisionctl.trainer.backends.choose import BackendName, choose_backend
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer.megatron_schedule import MegatronSchedule
from precisionctl.trainer.parallel import shares, world
from precisionctl.trainer.saved import parts, run_folder
from precisionctl.trainer.saved.parts import Load, Part
from precisionctl.trainer.settings import Settings, check_length


@dataclass(frozen=True)
class RunPlan:
    """A run but for its data. `load` and `skipped` say what is taken from the `source`, `plan` how its tensors become
    the model's; `schedule` is the checkpoint's where that goes on, `known` the FP8 state to start from."""

    settings: Settings
    recipe: Recipe
    out: Path
    source: Reader
    plan: Plan
    load: Load
    skipped: frozenset[Part]
    schedule: MegatronSchedule | None
    backend: BackendName
    known: KnownState

    @property
    def model(self) -> ModelShape:
        return self.plan.model

    @property
    def held_out(self) -> Data | None:
        """What the recipe says of held-out data, if it names some."""
        data = self.recipe.data
        return replace(data, path=data.held_out, blend=(), packing=False) if data.held_out else None

    def identity_with(self, data: str) -> Mapping[str, Any]:
        """What tells this run, over data with this fingerprint, from others."""
        start = dict(self.settings.start) | ({"schedule": "the checkpoint's"} if self.schedule else {})
        return run_folder.identity(self.source, data, self.recipe, load=self.load, **start)


def plan_run(settings: Settings, recipe: Recipe, ranks: int) -> RunPlan:
    """Check all of a run of so many ranks that needs neither its data nor a tensor; nothing is written.

    Raises what opening and planning raise, OutputError for a folder that the checkpoint is in, RecipeError for a recipe
    that does not fit the ranks or the model, PrecisionError for sizes that no FP8 GEMM has, UnknownArchitecture for a
    model that no trainer here runs, and EnvironmentProblem for a backend that this machine does not have.
    """
    world.check(ranks, recipe)
    run_folder.check_place(settings.folder, settings.checkpoint)
    source = open_checkpoint(settings.checkpoint)
    load, skipped = parts.left(source, settings.load, settings.skip)
    schedule = parts.schedule_of(source, skipped, settings.overrides)
    plan = make_plan(source, "megatron")
    backend = choose_backend(settings.backend, recipe.precision)
    check_length(recipe, plan.model)
    shares.check(plan.model, recipe.parallel)
    graphs.check(recipe, plan.model, backend, ranks)
    precision = recipe.precision.of_layers(plan.model.num_layers)
    GPT(plan.model, precision, device="meta")  # which takes no memory, and has all that it refuses
    if settings.collect_amax:
        check_fp8_gemms(plan, replace(precision, fp8=True))
    known = known_state(source, plan.gemms, settings.fp8_state, drop="fp8" in skipped)
    return RunPlan(settings, recipe, settings.folder, source, plan, load, skipped, schedule, backend, known)
