"""What a run takes from a checkpoint: weights, optimizer, generators; by parameter, whichever way Megatron stored them.

`saving.py` is the inverse.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeGuard

import torch

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.megatron.carried_run import MegatronReader, WithOptimizer, of_megatron, optimizer_settings
from precisionctl.checkpoints.megatron.logical import STATE
from precisionctl.checkpoints.module import LiveModel
from precisionctl.checkpoints.torch_dist.masters import prove_masters
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.conversion.convert import run as convert
from precisionctl.errors import CheckpointError, DamagedCheckpoint, damage
from precisionctl.param import TensorSpec
from precisionctl.planning import checks
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Plan
from precisionctl.recipe import Optimizer
from precisionctl.trainer.optimizer.adamw import KINDS
from precisionctl.trainer.run import Run

COLLECTED = "collected in BF16 training"
"""The producer of a state that a BF16 run recorded."""

RNG = "precisionctl_rng/shard_0_1"
"""Not Megatron's `rng_state`, which holds what no run of ours draws from."""

OPTIMIZER = "precisionctl_optimizer/shard_0_1"
"""What an optimizer keeps beside Megatron's tensors."""

_WITHOUT = "Use --skip optimizer, or --load weights."


def load_weights(source: Reader, run: Run) -> None:
    """Fill the masters, in FP32 whatever the source holds, and round them into the model."""
    plan = make_plan(source, "megatron", dtype=torch.float32)
    with run.optimizer.loading("param") as masters:
        convert(plan, source, LiveModel(run.model.model, masters, parts=run.model.shares.parts))
    run.optimizer.publish()


def has_optimizer(source: Reader) -> TypeGuard[MegatronReader]:
    """Whether there is an optimizer whose state is known by parameter. Raises DamagedCheckpoint."""
    return of_megatron(source) and any(name.startswith(f"{STATE}exp_avg.") for name in optimizer_specs(source))


def optimizer_specs(source: MegatronReader) -> Mapping[str, TensorSpec]:
    """The optimizer's tensors. Raises DamagedCheckpoint where they are not those of the model."""
    with _how_to_go_on():
        return source.optimizer_specs


@contextmanager
def _how_to_go_on() -> Iterator[None]:
    """A conversion's advice is none to a run."""
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
    wanted = {f"{STATE}{kind}.{name}": (kind, name) for kind in KINDS for name in run.model.shares.parts}
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
        with _how_to_go_on():
            prove_masters(source)
    if isinstance(source, TorchDistReader) and OPTIMIZER in source.objects:
        with damage("what no optimizer of ours keeps", source.path, _WITHOUT):
            run.optimizer.restore(source.read_object(OPTIMIZER))
    for kind in KINDS:  # one after the other: an optimizer that keeps them in fewer bits has one at a time in FP32
        jobs = tuple(job for job in plan.jobs if job.name.startswith(f"{STATE}{kind}."))
        with run.optimizer.loading(kind) as tensors:
            named = {f"{STATE}{kind}.{name}": tensor for name, tensor in tensors.items()}
            parts = {f"{STATE}{kind}.{name}": part for name, part in run.model.shares.parts.items()}
            live = LiveModel(run.model.model, named, parts=parts)
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
