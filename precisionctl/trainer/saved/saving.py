"""Runs as checkpoints: model, optimizer, FP8 state, generators and companions as an iteration of a Megatron
`torch_dist` directory, committed at once.

A save begins, writes and ends. Beginning and ending are few small files, and all ranks' meetings; a thread of each rank
writes. With `train.async_save` it writes what it has copied, and the run goes on meanwhile.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from precisionctl.checkpoints import encodings_file
from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.encodings_file import WeightEncodings
from precisionctl.checkpoints.megatron.carried_run import CarriedRun
from precisionctl.checkpoints.megatron.keys import directory_name, write_tracker
from precisionctl.checkpoints.megatron.logical import STATE
from precisionctl.checkpoints.module import LiveModel, Made, Part, RowsOf, Snapshot
from precisionctl.checkpoints.output import Output, disk_problems
from precisionctl.checkpoints.torch_dist.writer import TorchDistWriter
from precisionctl.conversion.weights_digest import digest_written
from precisionctl.conversion.worker import Worker
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8States
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Plan
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.optimizer.adamw import KINDS
from precisionctl.trainer.run import Run
from precisionctl.trainer.saved.run_folder import Saved, prune, sign
from precisionctl.trainer.saved.state import COLLECTED, OPTIMIZER, RNG

PRODUCER = "precisionctl"

_WRITTEN, _WRITING, _FAILED = range(3)
_BETWEEN_WORDS = 0.05
"""Seconds."""


class Saver:
    """Saves a run in `out`, an iteration at a time. `wanted` is which run it is, `companions` go along, and so does the
    FP8 state `carried` beside the run's own, and how the source's weights were `coded`: weights that training leaves as
    they are can be those codes again.

    The bytes are the same for any number of ranks, at once or while the run goes on. What is under an iteration's name
    is complete. Raises DiskProblem.
    """

    def __init__(
        self,
        run: Run,
        out: Path,
        wanted: Mapping[str, Any],
        companions: Companions,
        carried: Fp8States | None,
        coded: WeightEncodings | None = None,
    ) -> None:
        self._run, self._out, self._wanted = run, out, wanted
        self._companions, self._carried, self._coded = companions, carried, coded
        self._going: _Going | None = None
        self.newest: int | None = None
        """The step of the last one that was committed."""

    def save(self) -> None:
        """Commit the run as it stands, then drop iterations beyond `train.keep`; or begin to. One that is under way is
        waited for: no more than one copy is held."""
        self.finish()
        iteration = _begin(self._run, self._out, self._wanted, self._companions, self._carried)
        meanwhile, live = self._run.recipe.train.async_save, _live_model(self._run)
        held = (Snapshot.of(live) if meanwhile else live) if self._run.world.writes else None
        self._going = _Going(iteration, held)
        if not meanwhile:
            self.finish()

    def poll(self) -> None:
        """End a save that all ranks have written. Raises what one of them has met."""
        if self._going is None:
            return
        going, world = self._going, self._run.world
        worst = int(world.largest(torch.tensor(going.stage)))
        if worst == _FAILED:
            going.check()
            world.meet()  # where another rank says what it was
        if worst == _WRITTEN:
            self._going = None
            self._end(going.iteration)

    def finish(self) -> None:
        """Wait for a save that is under way, and end it. Raises what a rank has met. All the while ranks speak with one
        another, so that one which is killed is noticed as it is in an update."""
        while self._going:
            self.poll()
            if self._going:
                self._going.thread.join(_BETWEEN_WORDS)

    def _end(self, iteration: "_Iteration") -> None:
        world = self._run.world
        world.meet()
        if world.first:
            with disk_problems(iteration.output):
                iteration.writer.finish(iteration.of_its_weights(iteration.fp8))
                if beside := iteration.of_its_weights(iteration.collected) or iteration.carried:
                    sidecar.write(iteration.output.partial / sidecar.RELATIVE, beside)
                if self._coded:
                    encodings_file.write(iteration.output.partial, self._coded)
                iteration.output.commit()
                write_tracker(self._out, iteration.step)
                prune(self._out, iteration.step, self._run.recipe.train.keep)
        world.meet()
        self.newest = iteration.step


@dataclass(frozen=True)
class _Iteration:
    """What a checkpoint is to be, as the run was when it began: of FP8 state, what its modules compute with, what it
    has `collected` in BF16, and what is only `carried`."""

    step: int
    plan: Plan
    output: Output
    writer: TorchDistWriter
    fp8: Fp8States | None
    collected: Fp8States | None
    carried: Fp8States | None

    def of_its_weights(self, states: Fp8States | None) -> Fp8States | None:
        """State that is the run's own, bound to the weights that are written."""
        if states is None:
            return None
        model = replace(self.plan, jobs=tuple(job for job in self.plan.jobs if not job.name.startswith(STATE)))
        return replace(states, of_weights=digest_written(model, self.writer))


class _Going:
    """A save whose tensors a thread is writing."""

    def __init__(self, iteration: _Iteration, held: LiveModel | Snapshot | None) -> None:
        self.iteration = iteration
        self._met: BaseException | None = None
        self.thread = Thread(target=self._write, args=(held,), daemon=True)
        self.thread.start()

    @property
    def stage(self) -> int:
        """How far it is on this rank."""
        if self.thread.is_alive():
            return _WRITING
        return _FAILED if self._met else _WRITTEN

    def check(self) -> None:
        """Raise what the thread has met."""
        if self._met:
            raise self._met

    def _write(self, held: LiveModel | Snapshot | None) -> None:
        try:
            if held:
                _write(self.iteration, held)
        except BaseException as error:
            self._met = error


def _begin(
    run: Run, out: Path, wanted: Mapping[str, Any], companions: Companions, carried: Fp8States | None
) -> _Iteration:
    """Files of their final sizes, with holes for the tensors, beside their place."""
    plan, output = _plan(run), Output(out / directory_name(run.step))
    writer = TorchDistWriter(
        output.partial,
        plan.model,
        plan.targets,
        run=_carried(run),
        companions=companions,
    )
    if run.world.first:
        with disk_problems(output):
            output.begin()
            sign(output.partial, _saved(run, wanted))
            writer.lay_out()
    run.world.meet()
    return _Iteration(run.step, plan, output, writer, _live(run), _collected(run, carried), carried)


def _carried(run: Run) -> CarriedRun:
    kept = run.optimizer.kept
    objects = {RNG: _rng(), **({OPTIMIZER: dict(kept)} if kept else {})}
    return CarriedRun(run.step, _common(run), objects)


def _saved(run: Run, wanted: Mapping[str, Any]) -> Saved:
    guard = run.guard.kept if run.guard else None
    schedule = asdict(run.schedule) if run.schedule else None
    return Saved(run.step, run.position, wanted, guard, schedule, asdict(run.skips))


def _write(iteration: _Iteration, tensors: LiveModel | Snapshot) -> None:
    """This rank's parts, to the disk."""
    mine = RowsOf(iteration.writer, tensors)
    worker = Worker(iteration.plan, tensors, mine)
    with disk_problems(iteration.output):
        for job in iteration.plan.jobs:
            worker.do(job)
        mine.sync()


def _live_model(run: Run) -> LiveModel:
    """What this rank saves."""
    saved, prefixes = run.model.shares.saved, ("", *(f"{STATE}{kind}." for kind in KINDS))
    parts = {prefix + name: part for prefix in prefixes for name, part in saved.items()}
    return LiveModel(run.model.model, _live_tensors(run), parts=parts)


def _live_tensors(run: Run) -> Mapping[str, Tensor]:
    """Parameters and what the optimizer keeps, by Megatron's names."""
    sets: dict[str, Mapping[str, Tensor]] = {"": run.optimizer.parameters}
    sets |= {f"{STATE}{kind}.": tensors for kind, tensors in run.optimizer.tensors.items()}
    if not any(isinstance(tensors, Made) for tensors in sets.values()):
        return {prefix + name: tensor for prefix, tensors in sets.items() for name, tensor in tensors.items()}
    names = [(prefix, name) for prefix, tensors in sets.items() for name in tensors]
    return Made({prefix + name: partial(sets[prefix].__getitem__, name) for prefix, name in names})


def with_optimizer(plan: Plan) -> Plan:
    """The plan of a model, and of the optimizer's tensors of each kind behind it."""
    jobs, targets = [*plan.jobs], dict(plan.targets)
    for kind in KINDS:
        for job in plan.jobs:
            write = f"{STATE}{kind}.{job.name}"
            jobs.append(replace(job, name=write, reads=(write,), writes=(write,)))
            targets[write] = replace(plan.targets[job.name], dtype=torch.float32)
    return replace(plan, jobs=tuple(jobs), targets=targets)


def _plan(run: Run) -> Plan:
    """From the live model and its optimizer to a checkpoint of both."""
    stored = {name: _as_stored(run, name) for name in run.model.shares.parts}
    return with_optimizer(make_plan(LiveModel(run.model.model, {}, parts=stored), "megatron"))


def _as_stored(run: Run, name: str) -> Part:
    """A parameter that is cut for several ranks is FP32, and stored as one that is not."""
    part, here = run.model.shares.parts[name], run.optimizer.parameters.get(name)
    if here is None or isinstance(here, DTensor):
        return part
    return replace(part, spec=replace(part.spec, dtype=here.dtype))


def _live(run: Run) -> Fp8States | None:
    """State of the modules that compute in FP8; during steps in BF16, as their recorder has it."""
    recorded = run.recorder.states() if run.recorder else {}
    live = {
        name: state
        for name, linear in fp8_linears(run.model).items()
        if (state := recorded.get(name) or linear.fp8_state())
    }
    return Fp8States(run.recipe.precision.delayed, live, producer=PRODUCER, iteration=run.step) if live else None


def _collected(run: Run, carried: Fp8States | None) -> Fp8States | None:
    """What a BF16 run has collected, which has grown out of what was carried."""
    if run.recorder is None or run.recipe.precision.fp8:
        return None
    collected = Fp8States(run.recipe.precision.delayed, run.recorder.states(), producer=COLLECTED, iteration=run.step)
    return replace(collected, raw=carried.raw, statistics=carried.statistics) if carried else collected


def _common(run: Run) -> dict[str, object]:
    """Optimizer and schedule as Megatron spells them (optimizer.py, optimizer_param_scheduler.py: state_dict)."""
    settings = run.recipe.optimizer
    group = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}
    return {
        "optimizer": {"optimizer": {"state": {"common_step": run.optimizer.steps}, "param_groups": [group]}},
        "opt_param_scheduler": _schedule(run)
        | {
            "start_wd": settings.weight_decay,
            "end_wd": settings.weight_decay,
            "wd_incr_style": "constant",
            "wd_incr_steps": run.recipe.train.steps * run.recipe.train.batch_size,
        },
    }


def _schedule(run: Run) -> dict[str, object]:
    settings, schedule, train = run.recipe.optimizer, run.recipe.schedule, run.recipe.train
    if (carried := run.schedule) is not None:
        keys = ("max_lr", "min_lr", "lr_decay_style", "lr_warmup_steps", "lr_decay_steps")
        return {key: getattr(carried, key) for key in keys} | {"num_steps": carried.samples(run.step, train.batch_size)}
    return {
        "max_lr": settings.lr,
        "min_lr": settings.lr * schedule.min_ratio,
        "lr_decay_style": {"wsd": "WSD"}.get(schedule.kind, schedule.kind),
        "lr_warmup_steps": schedule.warmup_steps * train.batch_size,
        "lr_decay_steps": train.steps * train.batch_size,
        "num_steps": run.step * train.batch_size,
    }


def _rng() -> dict[str, Tensor | None]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"torch_rng_state": torch.get_rng_state(), "cuda_rng_state": cuda}
