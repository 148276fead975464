"""The parts of a checkpoint that a run begins with: its weights always; optimizer, schedule, position in the data,
generators and FP8 state unless they are left behind.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Literal, get_args

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.megatron.carried_run import of_megatron
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.errors import CheckpointError, DamagedCheckpoint, RecipeError
from precisionctl.trainer.optimizer.megatron_schedule import MegatronSchedule, read_schedule
from precisionctl.trainer.run import Run
from precisionctl.trainer.saved import state
from precisionctl.trainer.saved.run_folder import Saved, read_saved

Load = Literal["full", "weights"]
Part = Literal["optimizer", "schedule", "data", "rng", "fp8"]
PARTS: tuple[Part, ...] = get_args(Part)
_OF_A_RUN: tuple[Part, ...] = ("optimizer", "schedule", "data", "rng")
"""What `--load weights` leaves: FP8 state is of the weights, not of the run."""


def left(source: Reader, load: Load | None, skip: Collection[Part]) -> tuple[Load, frozenset[Part]]:
    """Full or weights (where nothing is said, full if there is an optimizer), and what of it is left behind."""
    load = load or ("full" if "optimizer" in skip or state.has_optimizer(source) else "weights")
    return load, frozenset(skip) | frozenset(_OF_A_RUN if load == "weights" else ())


def schedule_of(source: Reader, skipped: Collection[Part], overrides: Sequence[str]) -> MegatronSchedule | None:
    """The schedule that goes on: that of a checkpoint of Megatron's, or of a run of ours that went on with such a one.

    None is the recipe's: where the command line sets a key of it, and of a run of ours that had its recipe's. Raises
    DamagedCheckpoint.
    """
    if "schedule" in skipped or sets_rates(overrides) or not of_megatron(source):
        return None
    if saved := _saved(source):
        return MegatronSchedule(**saved.schedule) if saved.schedule else None
    return read_schedule(source.common, source.args, source.iteration or 0, source.path)


def sets_rates(overrides: Sequence[str]) -> bool:
    """Whether the command line says what the learning rates are to be."""
    return any(override.strip().startswith(("optimizer.lr", "schedule.")) for override in overrides)


def first_step(source: Reader, skipped: Collection[Part], steps: int) -> int:
    """How many of its `steps` a new run has behind it. Raises CheckpointError where there is no optimizer to take, and
    RecipeError where no step is left."""
    if "optimizer" not in skipped and not state.has_optimizer(source):
        raise CheckpointError(
            "no optimizer state that can be read", where=source.path, do="Use --skip optimizer, or --load weights."
        )
    first = 0 if "schedule" in skipped else source.iteration or 0
    if first >= steps:
        raise RecipeError(
            f"the checkpoint is at step {first}, and train.steps is {steps}",
            do="Steps count on from the checkpoint's: raise train.steps, or use --skip schedule or --load weights.",
        )
    return first


def take(run: Run, source: Reader, skipped: Collection[Part]) -> None:
    """Load into a new run what is not left behind. Everything is checked before anything is loaded.

    Raises CheckpointError where there is no such part, MissingTensor and UnmappedTensor where an optimizer is not the
    model's, and RecipeError where no step is left.
    """
    run.step = first_step(source, skipped, run.recipe.train.steps)
    if "optimizer" not in skipped and state.has_optimizer(source):
        state.plan_optimizer(source, run)
    saved = _saved(source)
    if "data" not in skipped and saved and saved.identity["data"] == run.rows.fingerprint:
        run.position = saved.position
    state.load_weights(source, run)
    if "optimizer" not in skipped and state.has_optimizer(source):
        state.load_optimizer(source, run)
    if "rng" not in skipped and isinstance(source, TorchDistReader):
        state.load_rng(source)


def notes(run: Run, source: Reader, skipped: Collection[Part], overrides: Sequence[str]) -> Iterator[str]:
    """What was taken from a checkpoint that no run of ours wrote, and what was left of any."""
    if not of_megatron(source):
        return
    foreign = _saved(source) is None
    if "optimizer" not in skipped and foreign:
        differing = state.other_settings(source, run.recipe.optimizer)
        yield f"optimizer: masters and moments of the checkpoint, after {state.updates(source)} updates" + (
            f"; it had {differing}" if differing else ""
        )
    if run.schedule:
        yield f"learning rates: the checkpoint's ({run.schedule.words}); --skip schedule takes the recipe's"
    elif "schedule" not in skipped and foreign:
        why = "as --set says" if sets_rates(overrides) else "as the checkpoint has no schedule"
        yield f"learning rates: the recipe's, {why}, from step {source.iteration or 0} on"
    if "data" not in skipped and foreign:
        yield "data: from their first row, as another program took its own"
    with suppress(DamagedCheckpoint):
        if "optimizer" in skipped and source.optimizer_specs:
            yield "the checkpoint's optimizer state is left behind"


def _saved(source: Reader) -> Saved | None:
    return read_saved(source) if isinstance(source, TorchDistReader) else None
