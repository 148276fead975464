"""A run saved and loaded: model, optimizer, FP8 state, generators and companions, as one iteration of a Megatron
`torch_dist` directory, committed at once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from precisionctl.checkpoints import encodings_file
from precisionctl.checkpoints.base import Companions, Reader
from precisionctl.checkpoints.encodings_file import Coded
from precisionctl.checkpoints.megatron_dist import TorchDistReader
from precisionctl.checkpoints.megatron_dist_writer import TorchDistWriter
from precisionctl.checkpoints.megatron_keys import directory_name, write_tracker
from precisionctl.checkpoints.module import LiveModel, RowsOf
from precisionctl.checkpoints.output import Output, disk_problems
from precisionctl.convert import run as convert
from precisionctl.errors import CheckpointError, damage
from precisionctl.fp8 import sidecar
from precisionctl.fp8.encoding import Encoding
from precisionctl.fp8.state import Fp8States
from precisionctl.param import TensorSpec
from precisionctl.plan import Plan, make_plan
from precisionctl.trainer.backend import fp8_linears
from precisionctl.trainer.loop import Run
from precisionctl.trainer.run_folder import Saved, prune, sign

PRODUCER = "precisionctl"
COLLECTED = "collected in BF16 training"
"""The producer of a state that a BF16 run recorded."""

RNG = "precisionctl_rng/shard_0_1"
"""Not Megatron's `rng_state`, which holds what no run of ours draws from."""

_STATE = "optimizer.state"
_KINDS = ("param", "exp_avg", "exp_avg_sq")


def load_weights(source: Reader, run: Run) -> None:
    """Fill the masters, in FP32 whatever the source holds, and round them into the model."""
    plan = make_plan(source, "megatron", dtype=torch.float32)
    convert(plan, source, LiveModel(run.model.model, run.optimizer.masters))
    run.optimizer.publish()


def has_optimizer(source: Reader) -> bool:
    """Whether there is optimizer state that `load_optimizer` can read: stored by parameter."""
    return isinstance(source, TorchDistReader) and any(
        name.startswith(f"{_STATE}.exp_avg.") for name in source.optimizer_specs
    )


def load_optimizer(source: TorchDistReader, run: Run) -> None:
    """Fill masters and moments, and the number of updates. Raises CheckpointError where some are missing."""
    plan = make_plan(source, "megatron")
    wanted = _optimizer_plan(plan, _KINDS)
    missing = [name for job in wanted.jobs for name in job.reads if name not in source.optimizer_specs]
    if missing:
        raise CheckpointError(
            f"no `{missing[0]}`: the optimizer's state is not whole", where=source.path, do="Use --load weights."
        )
    convert(wanted, _OptimizerOf(source), LiveModel(run.model.model, _optimizer_tensors(run)))
    run.optimizer.steps = _updates(source)
    run.optimizer.publish()


class _OptimizerOf:
    """The optimizer's tensors of a checkpoint, as a source."""

    encodings: Mapping[str, Encoding] = {}

    def __init__(self, reader: TorchDistReader) -> None:
        self.specs: Mapping[str, TensorSpec] = reader.optimizer_specs
        self.chunks = reader.chunks


def _optimizer_plan(plan: Plan, kinds: Iterable[str]) -> Plan:
    """The plan of a model, for the optimizer's tensors of each kind instead."""
    jobs, targets = [], {}
    for kind in kinds:
        for job in plan.jobs:
            write = f"{_STATE}.{kind}.{job.name}"
            jobs.append(replace(job, name=write, reads=(write,), writes=(write,)))
            targets[write] = replace(plan.targets[job.name], dtype=torch.float32)
    return replace(plan, jobs=tuple(jobs), targets=targets)


def _optimizer_tensors(run: Run) -> dict[str, Tensor]:
    kinds = run.optimizer.tensors.items()
    return {f"{_STATE}.{kind}.{name}": tensor for kind, tensors in kinds for name, tensor in tensors.items()}


def _updates(source: TorchDistReader) -> int:
    """Adam's count of updates, where Megatron's optimizers keep it in the common data."""
    with damage("an optimizer that is not Megatron's", source.path):
        found = source.common.get("optimizer", {})
        inner = found.get("optimizer", found)
        groups = inner.get("param_groups") or [{}]
        step = inner.get("state", {}).get("common_step", groups[0].get("step", source.iteration))
        if step is None:
            raise CheckpointError("nothing says how many updates the optimizer made", where=source.path)
        return int(step)


def load_rng(source: TorchDistReader) -> None:
    """Restore the generators, if a run of ours saved them."""
    if RNG in source.objects:
        state = source.read_object(RNG)
        with damage("states of generators that are none", source.path):
            torch.set_rng_state(state["torch_rng_state"])
            if torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda_rng_state"])


def save(
    run: Run,
    out: Path,
    wanted: Mapping[str, Any],
    companions: Companions,
    carried: Fp8States | None,
    coded: Coded | None = None,
) -> None:
    """Commit the run as it stands as a new iteration of `out`, then drop those beyond `train.keep`.

    The state of modules that compute in FP8 goes into `_extra_state`; what is collected, or carried beside it with its
    own date, into the sidecar. Each rank writes its rows where they belong, and the first all else: the bytes are the
    same for any number of them. `coded` is how the source's weights were coded: weights that training leaves as they
    are can be those codes again. Raises DiskProblem; what is under an iteration's name is complete all the same.
    """
    plan, live = _plan(run), LiveModel(run.model.model, {**run.optimizer.parameters, **_optimizer_tensors(run)})
    output = Output(out / directory_name(run.step))
    writer = TorchDistWriter(
        output.partial,
        plan.model,
        plan.targets,
        iteration=run.step,
        companions=companions,
        common=_common(run),
        objects={RNG: _rng()},
    )
    with disk_problems(output):
        if run.world.first:
            output.begin()
            sign(output.partial, Saved(run.step, run.position, wanted, run.guard.kept if run.guard else None))
            writer.lay_out()
        run.world.meet()
        if run.world.writes:
            mine = RowsOf(writer, live)
            convert(plan, live, mine)
            mine.sync()
        run.world.meet()
        if run.world.first:
            writer.finish(_live(run))
            if beside := _beside(run, carried):
                sidecar.write(output.partial / sidecar.RELATIVE, beside)
            if coded:
                encodings_file.write(output.partial, coded)
            output.commit()
            write_tracker(out, run.step)
            prune(out, run.step, run.recipe.train.keep)
        run.world.meet()


def _plan(run: Run) -> Plan:
    """From the live model and its optimizer to a checkpoint of both."""
    model = make_plan(LiveModel(run.model.model, _as_stored(run)), "megatron")
    optimizer = _optimizer_plan(model, run.optimizer.tensors)
    return replace(model, jobs=model.jobs + optimizer.jobs, targets={**model.targets, **optimizer.targets})


def _as_stored(run: Run) -> dict[str, Tensor]:
    """The parameters' shapes and dtypes; one that is cut for several ranks is FP32, and stored as one that is not."""
    return {
        name: torch.empty(p.shape, dtype=run.model.backend.dtype if isinstance(p, DTensor) else p.dtype, device="meta")
        for name, p in run.optimizer.parameters.items()
    }


def _live(run: Run) -> Fp8States | None:
    """State of the modules that compute in FP8; during steps in BF16, as their recorder has it."""
    recorded = run.recorder.states() if run.recorder else {}
    live = {
        name: state
        for name, linear in fp8_linears(run.model).items()
        if (state := recorded.get(name) or linear.fp8_state())
    }
    return Fp8States(run.recipe.precision.delayed, live, producer=PRODUCER, iteration=run.step) if live else None


def _beside(run: Run, carried: Fp8States | None) -> Fp8States | None:
    """What is collected, which has grown out of what was carried; else that."""
    if run.recorder is None or run.recipe.precision.fp8:
        return carried
    collected = Fp8States(run.recipe.precision.delayed, run.recorder.states(), producer=COLLECTED, iteration=run.step)
    return replace(collected, raw=carried.raw, statistics=carried.statistics) if carried else collected


def _common(run: Run) -> dict[str, object]:
    """Optimizer and schedule as Megatron spells them (optimizer.py, optimizer_param_scheduler.py: state_dict)."""
    settings, schedule, train = run.recipe.optimizer, run.recipe.schedule, run.recipe.train
    group = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}
    return {
        "optimizer": {"optimizer": {"state": {"common_step": run.optimizer.steps}, "param_groups": [group]}},
        "opt_param_scheduler": {
            "max_lr": settings.lr,
            "min_lr": settings.lr * schedule.min_ratio,
            "lr_decay_style": {"wsd": "WSD"}.get(schedule.kind, schedule.kind),
            "lr_warmup_steps": schedule.warmup_steps * train.batch_size,
            "lr_decay_steps": train.steps * train.batch_size,
            "num_steps": run.step * train.batch_size,
            "start_wd": settings.weight_decay,
            "end_wd": settings.weight_decay,
            "wd_incr_style": "constant",
            "wd_incr_steps": train.steps * train.batch_size,
        },
    }


def _rng() -> dict[str, Tensor | None]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"torch_rng_state": torch.get_rng_state(), "cuda_rng_state": cuda}
