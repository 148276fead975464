"""Load a checkpoint into a run: always the weights; optimizer, schedule, position in the data, random generator states
and FP8 state unless they are skipped. The optimizer is loaded by parameter, whichever way Megatron or another trainer
stored it.

`saving.py` is the inverse.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Literal, TypeGuard

import torch
from torch import Tensor

from precisionctl.checkpoints.base import Reader, WithOptimizer, has_muon
from precisionctl.checkpoints.megatron.directory import of_megatron
from precisionctl.checkpoints.module import LiveModel
from precisionctl.checkpoints.other_trainers.trainer_run import TrainedReader, TrainerRun, of_trainer
from precisionctl.checkpoints.run_reader import RunReader, of_run, run_of
from precisionctl.checkpoints.torch_dist.masters import prove_masters
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.codes.numerics import are_finite
from precisionctl.commands.source_notes import reading_notes
from precisionctl.conversion.convert import convert
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, DamagedCheckpoint, MappingError, RecipeError, UnsafePickle, damage
from precisionctl.param import KINDS, MOMENTUM, Kind, TensorSpec, kinds_of, state_name
from precisionctl.planning import checks
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Plan
from precisionctl.recipe import Optimizer, Recipe
from precisionctl.sizes import counted
from precisionctl.trainer.data import Blend, Rows
from precisionctl.trainer.optimizer.megatron_schedule import MegatronSchedule, read_schedule
from precisionctl.trainer.parallel.world import local
from precisionctl.trainer.run import Run
from precisionctl.trainer.saved.other_settings import other_settings
from precisionctl.trainer.saved.run_folder import saved_of

Load = Literal["full", "weights"]
StatePart = Literal["optimizer", "schedule", "data", "rng", "fp8"]
_OF_THE_RUN: tuple[StatePart, ...] = ("optimizer", "schedule", "data", "rng")
"""The parts that `--load weights` skips. FP8 state is not one of them, as it belongs to the weights."""

RNG = "precisionctl_rng/shard_0_1"
"""Key of our random generator states. Megatron's `rng_state` has generators that our runs do not use."""

OPTIMIZER = "precisionctl_optimizer/shard_0_1"
"""Key of the optimizer's state that Megatron has no tensors for."""

_WITHOUT = "Use --skip optimizer, or --load weights."


def what_to_load(source: Reader, load: Load | None, skip: Collection[StatePart]) -> tuple[Load, frozenset[StatePart]]:
    """`full` or `weights` (if not given, `full` if there is an optimizer), and the parts that are skipped."""
    load = load or ("full" if "optimizer" in skip or has_optimizer(source) else "weights")
    return load, frozenset(skip) | frozenset(_OF_THE_RUN if load == "weights" else ())


def schedule_of(source: Reader, skipped: Collection[StatePart], overrides: Sequence[str]) -> MegatronSchedule | None:
    """The checkpoint's schedule of learning rates, if the run continues it: that of Megatron, or of a run of ours that
    continued Megatron's.

    None means the recipe's schedule. It is used if the schedule is skipped, if the command line sets learning rates,
    and after a run of ours that used its own recipe's. Raises DamagedCheckpoint for a schedule that makes no sense.
    """
    if "schedule" in skipped or sets_rates(overrides) or not of_megatron(source):
        return None
    saved = saved_of(source)
    if saved and saved.schedule is None:
        return None
    # Also that of a run of ours is read as Megatron's: the one in run.json does not count what the run itself has seen
    return read_schedule(source.common, source.args, source.iteration or 0, source.path)


def sets_rates(overrides: Sequence[str]) -> bool:
    """Whether the command line sets learning rates."""
    return any(override.strip().startswith(("optimizer.lr", "schedule.")) for override in overrides)


def first_step(source: Reader, skipped: Collection[StatePart], recipe: Recipe) -> int:
    """The step that a new run starts after: the checkpoint's, or 0 if the schedule is skipped. Raises CheckpointError
    if the optimizer is wanted and there is none, or none that the recipe's goes on from, RecipeError if no step is
    left."""
    if "optimizer" not in skipped:
        if not has_optimizer(source):
            raise CheckpointError("no optimizer state that can be read", where=source.path, do=_WITHOUT)
        trained_run(source, recipe.optimizer)
    first, steps = 0 if "schedule" in skipped else source.iteration or 0, recipe.train.steps
    if first >= steps:
        raise RecipeError(
            f"the checkpoint is at step {first}, and train.steps is {steps}",
            do="A run goes on from there: raise train.steps, or use --skip schedule or --load weights.",
        )
    return first


def start_of(source: Reader, skipped: Collection[StatePart], recipe: Recipe, rows: Rows | Blend) -> tuple[int, int]:
    """The step and the position in the data that a new run starts after. Raises as `first_step`."""
    saved = saved_of(source)
    same_data = "data" not in skipped and saved is not None and saved.identity["data"] == rows.fingerprint
    return first_step(source, skipped, recipe), saved.position if saved and same_data else 0


def load_run(run: Run, source: Reader, skipped: Collection[StatePart]) -> None:
    """Load the parts that are not skipped into a new run. Everything is checked before anything is loaded.

    Raises CheckpointError for a part that is not there, MissingTensor and UnmappedTensor for an optimizer that does not
    fit the model, RecipeError if no step is left.
    """
    run.step, run.position = start_of(source, skipped, run.recipe, run.rows)
    if "optimizer" in skipped:
        load_weights(source, run)
    else:
        load_with_optimizer(source, run)
    if "rng" not in skipped and isinstance(source, TorchDistReader):
        load_rng(source)


def load_with_optimizer(source: Reader, run: Run) -> None:
    """Load weights and optimizer: the weights too, because parameters that nothing trains have no master. Raises
    MissingTensor and UnmappedTensor, before anything is loaded, for an optimizer that does not fit the model."""
    assert has_optimizer(source), "runs of ours save it, and `start_of` has refused what has none"
    plan = plan_optimizer(source, run)
    load_weights(source, run)
    load_optimizer(source, run, plan)


def others_run(source: Reader, skipped: Collection[StatePart], optimizer: Optimizer) -> TrainerRun | None:
    """The update count and settings of another program's optimizer that the run continues; None if it continues
    none."""
    if saved_of(source) or "optimizer" in skipped:
        return None
    return trained_run(source, optimizer) if of_megatron(source) or _has_trainers_optimizer(source) else None


def loading_notes(recipe: Recipe, source: Reader, skipped: Collection[StatePart]) -> Iterator[str]:
    """Notes for the user: what was taken from another program's checkpoint, which settings of the optimizer differ, and
    what is left behind."""
    yield from reading_notes(source)
    if not (of_megatron(source) or _has_trainers_optimizer(source)):
        return
    theirs = others_run(source, skipped, recipe.optimizer)
    differing = "" if "optimizer" in skipped else other_settings(source, theirs, recipe.optimizer)
    if theirs:
        what = "masters, moments and momentum" if theirs.muon else "masters and moments"
        yield f"optimizer: {what} of the checkpoint, after {counted(theirs.updates, 'update')}" + (
            f"; it had {differing}" if differing else ""
        )
    elif differing:
        yield f"optimizer: the run before had {differing}"
    if recipe.optimizer.by_muon and "optimizer" not in skipped and of_run(source) and not has_muon(source):
        yield (
            "optimizer: AdamW trained the checkpoint's matrices: their moments are left behind, and Muon's momentum "
            "begins at zero"
        )
    if "data" not in skipped and saved_of(source) is None:
        yield "data: from the first row, as the checkpoint is another program's, with its own order of data"
    if theirs and of_trainer(source):
        yield f"not carried over from the run: {', '.join(theirs.left)}"
    with suppress(CheckpointError):
        if "optimizer" in skipped and source.optimizer_specs:
            yield "the checkpoint's optimizer state is left behind"


def load_weights(source: Reader, run: Run) -> None:
    """Load the master weights, converted to FP32 from any dtype, and set the model's weights to their rounding. Tables
    of integers have no masters and are loaded into the model."""
    plan = make_plan(source, "megatron", dtype=DType.float32).text
    with run.optimizer.loading("param") as masters:
        tensors = {**run.optimizer.parameters, **masters}
        convert(plan, source, LiveModel(run.model.model, tensors, shards=run.model.shards.tensors))
    run.optimizer.publish()


def has_optimizer(source: Reader) -> TypeGuard[RunReader]:
    """Whether there is an optimizer whose state can be read by parameter. Raises as `optimizer_specs`."""
    if not of_run(source):
        return False
    return any(name.startswith(state_name("exp_avg", "")) for name in optimizer_specs(source))


def _has_trainers_optimizer(source: Reader) -> TypeGuard[TrainedReader]:
    """Whether there is an optimizer of another trainer than Megatron, which need not fit the model."""
    with suppress(CheckpointError):
        return of_trainer(source) and bool(source.optimizer_specs)
    return False


def optimizer_specs(source: RunReader) -> Mapping[str, TensorSpec]:
    """The optimizer's tensors. Raises CheckpointError where they do not fit the model."""
    with _how_to_continue():
        return source.optimizer_specs


@contextmanager
def _how_to_continue() -> Iterator[None]:
    """A context that replaces the advice in errors about an optimizer: it is meant for conversions, and a run needs
    other advice."""
    try:
        yield
    except UnsafePickle:
        raise
    except (CheckpointError, MappingError) as error:
        raise type(error)(error.what, where=error.where, do=_WITHOUT) from error


def plan_optimizer(source: RunReader, run: Run) -> Plan:
    """The plan for loading FP32 master weights and moments.

    Of Megatron's checkpoints a parameter stored in FP32 may lack a master weight, as it is its own, and a frozen
    parameter may lack all; of another trainer's any weight without a master is its own. Where AdamW trained what Muon
    is to train, its moments are left out. Raises MappingError, with a table of what is missing, if the optimizer does
    not fit the model.
    """
    wanted = _state_names(run, muon=run.recipe.optimizer.by_muon)
    if of_trainer(source):
        with _how_to_continue():
            plan = make_plan(source, "megatron", optimizer=True)
        return replace(plan, jobs=tuple(job for job in plan.jobs if job.name in wanted))
    found, parameters = optimizer_specs(source), run.optimizer.parameters
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    expected = _state_names(run, muon=has_muon(source))
    optional = {
        key
        for key, (kind, name) in expected.items()
        if name in frozen or (kind == "param" and source.specs[name].dtype == DType.float32)
    }
    missing = [key for key in expected if key not in found and key not in optional]
    checks.check_names(missing, [key for key in found if key not in expected], _WITHOUT, source.path)
    plan = make_plan(source, "megatron", optimizer=True)
    return replace(plan, jobs=tuple(job for job in plan.jobs if job.name in found and job.name in wanted))


def _state_names(run: Run, *, muon: bool) -> Mapping[str, tuple[Kind, str]]:
    """Kind and parameter of all tensors that an optimizer of the run's model has, by their names: of AdamW alone, or
    with `muon`."""
    shapes = {name: shard.spec.shape for name, shard in run.model.shards.tensors.items()}
    return {
        state_name(kind, name): (kind, name)
        for kind in (*KINDS, MOMENTUM)
        for name, shape in shapes.items()
        if kind in kinds_of(name, len(shape), muon=muon)
    }


def load_optimizer(source: RunReader, run: Run, plan: Plan) -> None:
    """Load master weights, moments and the number of updates by `plan_optimizer`. Master weights that are not there
    stay as `load_weights` left them. Raises DamagedCheckpoint for flat buckets that do not fit the weights, and for
    moments and momentum that are not finite."""
    if isinstance(source, TorchDistReader) and source.in_buckets and run.world.first:
        with _how_to_continue():
            prove_masters(source)
    if isinstance(source, TorchDistReader) and OPTIMIZER in source.objects:
        with damage("what no optimizer of ours keeps", source.path, _WITHOUT):
            run.optimizer.load_extra_state(source.read_object(OPTIMIZER))
    for kind in run.optimizer.tensors:  # one by one: an optimizer with fewer bits has only one kind in FP32 at a time
        jobs = tuple(job for job in plan.jobs if job.name.startswith(state_name(kind, "")))
        with run.optimizer.loading(kind) as tensors:
            named = {state_name(kind, name): tensor for name, tensor in tensors.items()}
            shards = {state_name(kind, name): shard for name, shard in run.model.shards.tensors.items()}
            live = LiveModel(run.model.model, named, shards=shards)
            convert(replace(plan, jobs=jobs), WithOptimizer(source), live)
            if kind != "param":
                _require_finite(named, source)
    run.optimizer.steps = trained_run(source, run.recipe.optimizer).updates
    run.optimizer.publish()


def _require_finite(tensors: Mapping[str, Tensor], source: RunReader) -> None:
    """Raise DamagedCheckpoint for an optimizer's tensor with NaN or infinity, of this rank's shards. No loss shows them
    before they are in the weights: Muon makes a whole matrix NaN of one number, and AdamW that number, or never again
    changes it. (NaN in the weights shows in the first loss.)"""
    for name, tensor in tensors.items():
        values = local(tensor)
        if not (are_finite(values) or bool(values.isfinite().all())):  # the sum may overflow
            raise DamagedCheckpoint(f"`{name}` has NaN or infinity", where=source.path, do=_WITHOUT)


def trained_run(source: RunReader, optimizer: Optimizer) -> TrainerRun:
    """Count and settings of the checkpoint's AdamW, with which the `optimizer` goes on. Raises CheckpointError where
    there is no count, or Muon trained the matrices and is not to."""
    with _how_to_continue():
        run, by_muon = run_of(source), has_muon(source)
    if by_muon and not optimizer.by_muon:
        what = f"Muon trained the matrices, which have no moments for optimizer.preset = {optimizer.preset}"
        way = "Give --set optimizer.preset=muon, or --skip optimizer, or --load weights."
        raise CheckpointError(what, where=source.path, do=way)
    return run


def load_rng(source: TorchDistReader) -> None:
    """Restore the random generators, if a run of ours saved their states. Raises DamagedCheckpoint."""
    if RNG in source.objects:
        state = source.read_object(RNG)
        with damage("invalid states of random generators", source.path):
            torch.set_rng_state(state["torch_rng_state"])
            if torch.cuda.is_available() and state["cuda_rng_state"] is not None:  # None: saved without a GPU
                torch.cuda.set_rng_state(state["cuda_rng_state"])
