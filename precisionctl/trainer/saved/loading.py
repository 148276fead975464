"""What a run loads from a checkpoint: its weights always; optimizer, schedule, position in the data, random number
generators and FP8 state unless they are skipped. By parameter, whichever way Megatron stored them.

`saving.py` is the inverse.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal, TypeGuard

import torch

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.megatron.carried_run import MegatronReader, WithOptimizer, of_megatron, optimizer_settings
from precisionctl.checkpoints.megatron.logical import STATE
from precisionctl.checkpoints.module import LiveModel
from precisionctl.checkpoints.torch_dist.masters import prove_masters
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.conversion.convert import run as convert
from precisionctl.errors import CheckpointError, DamagedCheckpoint, RecipeError, damage
from precisionctl.param import TensorSpec
from precisionctl.planning import checks
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Plan
from precisionctl.recipe import Optimizer
from precisionctl.trainer.optimizer.adamw import KINDS
from precisionctl.trainer.optimizer.megatron_schedule import MegatronSchedule, read_schedule
from precisionctl.trainer.run import Run
from precisionctl.trainer.saved.run_folder import Saved, read_saved

Load = Literal["full", "weights"]
StatePart = Literal["optimizer", "schedule", "data", "rng", "fp8"]
_OF_THE_RUN: tuple[StatePart, ...] = ("optimizer", "schedule", "data", "rng")
"""What `--load weights` skips: FP8 state is of the weights, not of the run."""

COLLECTED = "collected in BF16 training"
"""The producer of a state that a BF16 run recorded."""

RNG = "precisionctl_rng/shard_0_1"
"""Not Megatron's `rng_state`, which holds what no run of ours draws from."""

OPTIMIZER = "precisionctl_optimizer/shard_0_1"
"""What an optimizer keeps beside Megatron's tensors."""

_WITHOUT = "Use --skip optimizer, or --load weights."


def what_to_load(source: Reader, load: Load | None, skip: Collection[StatePart]) -> tuple[Load, frozenset[StatePart]]:
    """Full or weights (where nothing is said, full if there is an optimizer), and what is skipped."""
    load = load or ("full" if "optimizer" in skip or has_optimizer(source) else "weights")
    return load, frozenset(skip) | frozenset(_OF_THE_RUN if load == "weights" else ())


def schedule_of(source: Reader, skipped: Collection[StatePart], overrides: Sequence[str]) -> MegatronSchedule | None:
    """The schedule that continues: that of a checkpoint of Megatron's, or of a run of ours that continued such a one.

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


def first_step(source: Reader, skipped: Collection[StatePart], steps: int) -> int:
    """How many of its `steps` a new run has behind it. Raises CheckpointError where there is no optimizer to take, and
    RecipeError where no step is left."""
    if "optimizer" not in skipped and not has_optimizer(source):
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


def load_run(run: Run, source: Reader, skipped: Collection[StatePart]) -> None:
    """Load into a new run what is not skipped. Everything is checked before anything is loaded.

    Raises CheckpointError where there is no such part, MissingTensor and UnmappedTensor where an optimizer is not the
    model's, and RecipeError where no step is left.
    """
    run.step = first_step(source, skipped, run.recipe.train.steps)
    if "optimizer" not in skipped and has_optimizer(source):
        plan_optimizer(source, run)
    saved = _saved(source)
    if "data" not in skipped and saved and saved.identity["data"] == run.rows.fingerprint:
        run.position = saved.position
    load_weights(source, run)
    if "optimizer" not in skipped and has_optimizer(source):
        load_optimizer(source, run)
    if "rng" not in skipped and isinstance(source, TorchDistReader):
        load_rng(source)


def loading_notes(run: Run, source: Reader, skipped: Collection[StatePart], overrides: Sequence[str]) -> Iterator[str]:
    """What was loaded from a checkpoint that no run of ours wrote, and what was skipped of any."""
    if not of_megatron(source):
        return
    foreign = _saved(source) is None
    if "optimizer" not in skipped and foreign:
        differing = other_settings(source, run.recipe.optimizer)
        yield f"optimizer: masters and moments of the checkpoint, after {updates(source)} updates" + (
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


def load_weights(source: Reader, run: Run) -> None:
    """Fill the master weights, in FP32 from whatever dtype, and round them into the model."""
    plan = make_plan(source, "megatron", dtype=torch.float32)
    with run.optimizer.loading("param") as masters:
        convert(plan, source, LiveModel(run.model.model, masters, shards=run.model.shards.tensors))
    run.optimizer.publish()


def has_optimizer(source: Reader) -> TypeGuard[MegatronReader]:
    """Whether there is an optimizer whose state is known by parameter. Raises DamagedCheckpoint."""
    return of_megatron(source) and any(name.startswith(f"{STATE}exp_avg.") for name in optimizer_specs(source))


def optimizer_specs(source: MegatronReader) -> Mapping[str, TensorSpec]:
    """The optimizer's tensors. Raises DamagedCheckpoint where they are not those of the model."""
    with _how_to_continue():
        return source.optimizer_specs


@contextmanager
def _how_to_continue() -> Iterator[None]:
    """Replaces the advice of an error, which is a conversion's, by one for a run."""
    try:
        yield
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(error.what, where=error.where, do=_WITHOUT) from error


def plan_optimizer(source: MegatronReader, run: Run) -> Plan:
    """How masters and moments come from a checkpoint.

    A parameter that is FP32 may be its own master, and one that is not trained have neither. Raises MissingTensor or
    UnmappedTensor, with a table, where the optimizer is not that of the model.
    """
    found, parameters = optimizer_specs(source), run.optimizer.parameters
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    wanted = {f"{STATE}{kind}.{name}": (kind, name) for kind in KINDS for name in run.model.shards.tensors}
    spared = {
        key
        for key, (kind, name) in wanted.items()
        if name in frozen or (kind == "param" and source.specs[name].dtype == torch.float32)
    }
    missing = [key for key in wanted if key not in found and key not in spared]
    checks.check_names(missing, [key for key in found if key not in wanted], _WITHOUT, source.path)
    plan = make_plan(source, "megatron", optimizer=True)
    return replace(plan, jobs=tuple(job for job in plan.jobs if job.name in found))


def load_optimizer(source: MegatronReader, run: Run) -> None:
    """Fill masters and moments, and the number of updates; masters that are not there stay as they are."""
    plan = plan_optimizer(source, run)
    if isinstance(source, TorchDistReader) and source.in_buckets and run.world.first:
        with _how_to_continue():
            prove_masters(source)
    if isinstance(source, TorchDistReader) and OPTIMIZER in source.objects:
        with damage("what no optimizer of ours keeps", source.path, _WITHOUT):
            run.optimizer.load_extra_state(source.read_object(OPTIMIZER))
    for kind in KINDS:  # one after another: an optimizer with fewer bits then has one kind at a time in FP32
        jobs = tuple(job for job in plan.jobs if job.name.startswith(f"{STATE}{kind}."))
        with run.optimizer.loading(kind) as tensors:
            named = {f"{STATE}{kind}.{name}": tensor for name, tensor in tensors.items()}
            shards = {f"{STATE}{kind}.{name}": shard for name, shard in run.model.shards.tensors.items()}
            live = LiveModel(run.model.model, named, shards=shards)
            convert(replace(plan, jobs=jobs), WithOptimizer(source), live)
    run.optimizer.steps = updates(source)
    run.optimizer.publish()


def updates(source: MegatronReader) -> int:
    """Adam's count of updates, where Megatron's optimizers keep it."""
    with damage("an optimizer that is not Megatron's", source.path, _WITHOUT):
        inner, group = _settings(source)
        step = inner.get("state", {}).get("common_step", group.get("step", source.iteration))
        if step is None:
            raise CheckpointError("nothing says how many updates the optimizer made", where=source.path, do=_WITHOUT)
        return int(step)


def _settings(source: MegatronReader) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What an optimizer (the first of several) says beside its tensors, and its group of parameters that decay."""
    found = next(iter(optimizer_settings(source)), {})
    inner = found.get("optimizer", found)
    groups = inner.get("param_groups") or [{}]
    return inner, next((group for group in groups if group.get("wd_mult") != 0.0), groups[0])


def other_settings(source: MegatronReader, settings: Optimizer) -> str:
    """Where the optimizer of a checkpoint has other numbers than the recipe, in words; empty where they agree."""
    with damage("an optimizer that is not Megatron's", source.path, _WITHOUT):
        group = _settings(source)[1]
        beta1, beta2 = group.get("betas", (None, None))
        theirs = {
            "beta1": beta1,
            "beta2": beta2,
            "epsilon": group.get("eps"),
            "weight_decay": group.get("weight_decay"),
        }
        ours = {key: getattr(settings, key) for key in theirs}
        differing = [
            f"{key} {value:g}, here {ours[key]:g}"
            for key, value in theirs.items()
            if isinstance(value, int | float) and value != ours[key]
        ]
    return ", ".join(differing)


def load_rng(source: TorchDistReader) -> None:
    """Restore the generators, if a run of ours saved them."""
    if RNG in source.objects:
        state = source.read_object(RNG)
        with damage("states of generators that are none", source.path):
            torch.set_rng_state(state["torch_rng_state"])
            if torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda_rng_state"])
