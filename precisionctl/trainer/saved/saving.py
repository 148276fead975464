"""Runs as checkpoints: model, optimizer, FP8 state, random number generators and companions as an iteration of a
Megatron `torch_dist` directory, written atomically.

A save begins, writes and ends. Beginning and ending are few small files, and barriers of all ranks; a thread of each
rank writes. With `train.async_save` it writes a copy, and the run goes on meanwhile.
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
from precisionctl.checkpoints.module import LazyTensors, LiveModel, LocalRows, Snapshot
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
from precisionctl.trainer.saved.loading import COLLECTED, OPTIMIZER, RNG
from precisionctl.trainer.saved.run_folder import Saved, prune, sign

PRODUCER = "precisionctl"

_WRITTEN, _WRITING, _FAILED = range(3)
"""Stages of a save on one rank; the largest of all ranks' counts."""

_POLL_SECONDS = 0.05


class Saver:
    """Saves a run in `out`, an iteration at a time. `identity` says which run it is, `companions` travel with it, and
    so does the FP8 state in `sidecar_state` beside the run's own. `encodings` are those of the source's weights: a
    weight that training leaves as it is can be stored as the same codes again.

    The bytes are the same for any number of ranks, and whether the run waits or goes on. What is under an iteration's
    name is complete. Raises DiskProblem.
    """

    def __init__(
        self,
        run: Run,
        out: Path,
        identity: Mapping[str, Any],
        companions: Companions,
        sidecar_state: Fp8States | None,
        encodings: WeightEncodings | None = None,
    ) -> None:
        self._run, self._out, self._identity = run, out, identity
        self._companions, self._sidecar_state, self._encodings = companions, sidecar_state, encodings
        self._pending: PendingSave | None = None
        self.newest: int | None = None
        """The step of the last checkpoint that is complete."""

    def save(self) -> None:
        """Save the run as it stands, then drop iterations beyond `train.keep`; or begin to. A pending save is waited
        for: there is never more than one copy."""
        self.finish()
        iteration = self._begin()
        in_background, live = self._run.recipe.train.async_save, _live_model(self._run)
        tensors = (Snapshot.of(live) if in_background else live) if self._run.world.writes else None
        self._pending = PendingSave(iteration, tensors)
        if not in_background:
            self.finish()

    def poll(self) -> None:
        """End the pending save if all ranks have written it. Raises what one of them has met."""
        if self._pending is None:
            return
        pending, world = self._pending, self._run.world
        slowest = int(world.all_reduce_max(torch.tensor(pending.stage)))
        if slowest == _FAILED:
            pending.raise_error()
            world.barrier()  # where another rank says what it was
        if slowest == _WRITTEN:
            self._pending = None
            self._end(pending.iteration)

    def finish(self) -> None:
        """Wait for the pending save, and end it. Raises what a rank has met. Ranks keep polling meanwhile, so that one
        which is killed is noticed as it is in an update."""
        while self._pending:
            self.poll()
            if self._pending:
                self._pending.thread.join(_POLL_SECONDS)

    def _begin(self) -> "_Iteration":
        """Make files of their final sizes, with holes for the tensors, in a partial directory."""
        run = self._run
        output = Output(self._out / directory_name(run.step))
        stored = dict(run.model.shards.tensors)
        for name, parameter in run.optimizer.parameters.items():
            if not isinstance(parameter, DTensor):  # those are FP32 in memory, and stored in the model's dtype
                stored[name] = replace(stored[name], spec=replace(stored[name].spec, dtype=parameter.dtype))
        plan = with_optimizer(make_plan(LiveModel(run.model.model, {}, shards=stored), "megatron"))
        writer = TorchDistWriter(
            output.partial, plan.model, plan.targets, run=_megatron_state(run), companions=self._companions
        )
        if run.world.first:
            guard = run.guard.saved_state if run.guard else None
            schedule = asdict(run.schedule) if run.schedule else None
            saved = Saved(run.step, run.position, self._identity, guard, schedule, asdict(run.skipped))
            with disk_problems(output):
                output.begin()
                sign(output.partial, saved)
                writer.lay_out()
        run.world.barrier()
        return _Iteration(run.step, plan, output, writer, *_fp8_states(run, self._sidecar_state), self._sidecar_state)

    def _end(self, iteration: "_Iteration") -> None:
        world = self._run.world
        world.barrier()
        if world.first:
            with disk_problems(iteration.output):
                iteration.writer.finish(iteration.of_its_weights(iteration.fp8))
                if sidecar_state := iteration.of_its_weights(iteration.collected) or iteration.carried:
                    sidecar.write(iteration.output.partial / sidecar.RELATIVE, sidecar_state)
                if self._encodings:
                    encodings_file.write(iteration.output.partial, self._encodings)
                iteration.output.commit()
                write_tracker(self._out, iteration.step)
                prune(self._out, iteration.step, self._run.recipe.train.keep)
        world.barrier()
        self.newest = iteration.step


@dataclass(frozen=True)
class _Iteration:
    """What a checkpoint is to be, as the run was when the save began: of FP8 state, what its modules compute with, what
    the run has `collected` in BF16, and what it only carries."""

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


class PendingSave:
    """A save whose tensors a thread is writing; None where this rank writes none."""

    def __init__(self, iteration: _Iteration, tensors: LiveModel | Snapshot | None) -> None:
        self.iteration = iteration
        self._error: BaseException | None = None
        self.thread = Thread(target=self._write, args=(tensors,), daemon=True)
        self.thread.start()

    @property
    def stage(self) -> int:
        """How far it is on this rank."""
        if self.thread.is_alive():
            return _WRITING
        return _FAILED if self._error else _WRITTEN

    def raise_error(self) -> None:
        """Raise what the thread has met, if anything."""
        if self._error:
            raise self._error

    def _write(self, tensors: LiveModel | Snapshot | None) -> None:
        """Write this rank's rows, and wait until they are on the disk."""
        if tensors is None:
            return
        try:
            mine = LocalRows(self.iteration.writer, tensors)
            worker = Worker(self.iteration.plan, tensors, mine)
            with disk_problems(self.iteration.output):
                for job in self.iteration.plan.jobs:
                    worker.do(job)
                mine.sync()
        except BaseException as error:
            self._error = error


def with_optimizer(plan: Plan) -> Plan:
    """The plan of a model, and of the optimizer's tensors of each kind behind it."""
    jobs, targets = [*plan.jobs], dict(plan.targets)
    for kind in KINDS:
        for job in plan.jobs:
            write = f"{STATE}{kind}.{job.name}"
            jobs.append(replace(job, name=write, reads=(write,), writes=(write,)))
            targets[write] = replace(plan.targets[job.name], dtype=torch.float32)
    return replace(plan, jobs=tuple(jobs), targets=targets)


def _live_model(run: Run) -> LiveModel:
    """What this rank saves: parameters and what the optimizer keeps, by Megatron's names."""
    kinds: dict[str, Mapping[str, Tensor]] = {"": run.optimizer.parameters}
    kinds |= {f"{STATE}{kind}.": tensors for kind, tensors in run.optimizer.tensors.items()}
    shards = {prefix + name: shard for prefix in kinds for name, shard in run.model.shards.saved.items()}
    tensors: Mapping[str, Tensor]
    if any(isinstance(tensors, LazyTensors) for tensors in kinds.values()):
        names = [(prefix, name) for prefix, tensors in kinds.items() for name in tensors]
        tensors = LazyTensors({prefix + name: partial(kinds[prefix].__getitem__, name) for prefix, name in names})
    else:
        tensors = {prefix + name: tensor for prefix, found in kinds.items() for name, tensor in found.items()}
    return LiveModel(run.model.model, tensors, shards=shards)


def _fp8_states(run: Run, carried: Fp8States | None) -> tuple[Fp8States | None, Fp8States | None]:
    """The state of modules that compute in FP8, during steps in BF16 as their recorder has it; and what a BF16 run
    collects, which has grown out of what was `carried`."""
    recipe, recorded = run.recipe.precision.delayed, run.recorder.states() if run.recorder else {}
    live = {
        name: state
        for name, linear in fp8_linears(run.model).items()
        if (state := recorded.get(name) or linear.fp8_state())
    }
    fp8 = Fp8States(recipe, live, producer=PRODUCER, iteration=run.step) if live else None
    if run.recorder is None or run.recipe.precision.fp8:
        return fp8, None
    collected = Fp8States(recipe, recorded, producer=COLLECTED, iteration=run.step)
    if carried:
        collected = replace(collected, raw=carried.raw, statistics=carried.statistics)
    return fp8, collected


def _megatron_state(run: Run) -> CarriedRun:
    """Optimizer and schedule as Megatron spells them (optimizer.py, optimizer_param_scheduler.py: state_dict), and
    under keys of our own the random number generators and what the optimizer keeps beside tensors."""
    settings, schedule, train = run.recipe.optimizer, run.recipe.schedule, run.recipe.train
    group = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}
    rates: dict[str, object]
    if run.schedule is not None:
        keys = ("max_lr", "min_lr", "lr_decay_style", "lr_warmup_steps", "lr_decay_steps")
        rates = {key: getattr(run.schedule, key) for key in keys}
        rates["num_steps"] = run.schedule.samples(run.step, train.batch_size)
    else:
        rates = {
            "max_lr": settings.lr,
            "min_lr": settings.lr * schedule.min_ratio,
            "lr_decay_style": {"wsd": "WSD"}.get(schedule.kind, schedule.kind),
            "lr_warmup_steps": schedule.warmup_steps * train.batch_size,
            "lr_decay_steps": train.steps * train.batch_size,
            "num_steps": run.step * train.batch_size,
        }
    decay = {
        "start_wd": settings.weight_decay,
        "end_wd": settings.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": train.steps * train.batch_size,
    }
    common: dict[str, object] = {
        "optimizer": {"optimizer": {"state": {"common_step": run.optimizer.steps}, "param_groups": [group]}},
        "opt_param_scheduler": rates | decay,
    }
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    objects: dict[str, Any] = {RNG: {"torch_rng_state": torch.get_rng_state(), "cuda_rng_state": cuda}}
    if run.optimizer.extra_state:
        objects[OPTIMIZER] = dict(run.optimizer.extra_state)
    return CarriedRun(run.step, common, objects)
