"""Save a run as an iteration of a Megatron `torch_dist` directory, atomically: model, optimizer, FP8 state, random
generator states and companion files.

A save begins, writes and ends. Beginning and ending write a few small files and have barriers for all ranks; tensors
are written by a thread on each rank. With `train.async_save` that thread writes a copy while the run goes on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from precisionctl.checkpoints.base import Reader, Writer
from precisionctl.checkpoints.chunks import chunk_files
from precisionctl.checkpoints.hf_directory import encodings_file
from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.checkpoints.megatron.carried_run import CarriedRun, adam_in_megatron, muon_in_megatron
from precisionctl.checkpoints.megatron.keys import directory_name, write_tracker
from precisionctl.checkpoints.megatron.towers import WithTowers
from precisionctl.checkpoints.module import LazyTensors, LiveModel, LocalRows, Snapshot
from precisionctl.checkpoints.output import Output, disk_problems, sync_all
from precisionctl.checkpoints.torch_dist.writer import TorchDistWriter
from precisionctl.conversion.weights_digest import digest_written
from precisionctl.conversion.worker import Worker
from precisionctl.dtypes import DType
from precisionctl.export.weight_encodings import weight_encodings
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import BY_RUN, COLLECTED, Fp8States
from precisionctl.param import KINDS, MOMENTUM, NOT_TRAINED, STATE, kinds_of, state_name
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Plan
from precisionctl.recipe import Optimizer
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.optimizer.megatron_schedule import megatron_scheduler, training_args
from precisionctl.trainer.run import Run
from precisionctl.trainer.saved.balance import balance_args
from precisionctl.trainer.saved.loading import OPTIMIZER, RNG
from precisionctl.trainer.saved.run_folder import prune, saved_run, sign

_WRITTEN, _WRITING, _FAILED = range(3)
"""Stages of a save on one rank. The stage on all ranks is the largest of theirs."""

_POLL_SECONDS = 0.05


class Saver:
    """Saves a run as iterations in the folder `out`. `identity` says which run it is (`run_folder.identity`). What
    belongs to the model and is not trained is saved with it: the companion files of the `source` and a wrapper's
    towers, and the FP8 state that the run does not use and has `carried` along. With the encodings of the source's
    weights, one that training did not change can become the same codes again.

    The bytes are the same for any number of ranks, with `async_save` or without. An iteration under its final name is
    complete. Raises DiskProblem.
    """

    def __init__(
        self,
        run: Run,
        out: Path,
        identity: Mapping[str, Any],
        source: Reader,
        carried: Fp8States | None,
    ) -> None:
        self._run, self._out, self._identity = run, out, identity
        self._source, self._carried, self._encodings = source, carried, weight_encodings(source)
        self._towers = make_plan(source, "megatron").towers if source.model.wrapper else None
        self._pending: PendingSave | None = None
        self.newest: int | None = None
        """The step of the last complete checkpoint of this Saver; None if there is none yet."""

    def save(self) -> None:
        """Save the run and remove iterations beyond `train.keep`; with `async_save`, begin to. Waits for a pending
        save first, so that there is never more than one copy in memory."""
        self.finish()
        iteration = self._begin()
        in_background, live = self._run.recipe.train.async_save, _live_model(self._run)
        tensors = (Snapshot.of(live) if in_background else live) if self._run.world.writes else None
        copy = partial(copy_towers, self._towers, self._source) if self._towers and self._run.world.first else None
        self._pending = PendingSave(iteration, tensors, copy)
        if not in_background:
            self.finish()

    def poll(self) -> None:
        """End the pending save if all ranks have written it. Raises the error of a rank that failed."""
        if self._pending is None:
            return
        pending, world = self._pending, self._run.world
        slowest = int(world.all_reduce_max(torch.tensor(pending.stage)))
        if slowest == _FAILED:
            if pending.error:
                raise pending.error
            world.barrier()  # raises, as the rank that failed does not get here
        if slowest == _WRITTEN:
            self._pending = None
            self._end(pending.iteration)

    def finish(self) -> None:
        """Wait for the pending save, and end it. Raises the error of a rank that failed. Ranks keep polling meanwhile:
        the collective in `poll` notices a rank that was killed."""
        while self._pending:
            self.poll()
            if self._pending:
                self._pending.thread.join(_POLL_SECONDS)

    def _begin(self) -> "_Iteration":
        """Create the files in a partial directory, in their final sizes, with holes for the tensors."""
        run = self._run
        output = Output(self._out / directory_name(run.step))
        stored = dict(run.model.shards.tensors)
        for name, parameter in run.optimizer.parameters.items():
            if not isinstance(parameter, DTensor):  # FSDP's are FP32 in memory, but stored in the model's dtype
                stored[name] = replace(stored[name], spec=replace(stored[name].spec, dtype=DType.of(parameter.dtype)))
        plan = make_plan(LiveModel(run.model.model, {}, shards=stored), "megatron")
        plan = with_optimizer(plan, run.recipe.optimizer)
        companions = self._source.companions
        writer: Writer = TorchDistWriter(
            output.partial, plan.model, plan.targets, run=_megatron_state(run), companions=companions
        )
        if self._towers:
            writer = WithTowers(writer, self._towers.targets)
        if run.world.first:
            guard = run.guard.saved_state if run.guard else None
            saved = saved_run(run, self._identity, run.model.balance, fp8=run.in_fp8, guard=guard)
            with disk_problems(output):
                output.begin()
                sign(output.partial, saved)
                writer.lay_out()
        run.world.barrier()
        return _Iteration(run.step, plan, output, writer, *_fp8_states(run, self._carried), self._carried)

    def _end(self, iteration: "_Iteration") -> None:
        world = self._run.world
        world.barrier()
        if world.first:
            with disk_problems(iteration.output):
                iteration.writer.finish(iteration.of_its_weights(iteration.fp8))
                sidecar_state = iteration.of_its_weights(iteration.collected) or iteration.carried
                complete(iteration.output, iteration.step, sidecar_state, self._encodings, self._run.recipe.train.keep)
        world.barrier()
        self.newest = iteration.step


@dataclass(frozen=True)
class _Iteration:
    """A checkpoint to be written, of the run as it was when the save began. It has three kinds of FP8 state: the state
    that its modules compute with (`fp8`), the state that a BF16 run has `collected`, and state that is only `carried`
    along."""

    step: int
    plan: Plan
    output: Output
    writer: Writer
    fp8: Fp8States | None
    collected: Fp8States | None
    carried: Fp8States | None

    def of_its_weights(self, states: Fp8States | None) -> Fp8States | None:
        """The run's own state with the digest of the weights that are written."""
        if states is None:
            return None
        model = replace(self.plan, jobs=tuple(job for job in self.plan.jobs if not job.name.startswith(STATE)))
        return replace(states, of_weights=digest_written(model, self.writer))


class PendingSave:
    """A save whose tensors are being written by a thread. `tensors` is None on a rank that writes none, and
    `copy_towers` on one that copies none."""

    def __init__(
        self,
        iteration: _Iteration,
        tensors: LiveModel | Snapshot | None,
        copy_towers: Callable[[Writer], None] | None,
    ) -> None:
        self.iteration, self._copy_towers = iteration, copy_towers
        self.error: BaseException | None = None
        """What the thread has raised."""
        self.thread = Thread(target=self._write, args=(tensors,), daemon=True)
        self.thread.start()

    @property
    def stage(self) -> int:
        """The stage of the save on this rank."""
        if self.thread.is_alive():
            return _WRITING
        return _FAILED if self.error else _WRITTEN

    def _write(self, tensors: LiveModel | Snapshot | None) -> None:
        """Write this rank's rows and sync them."""
        if tensors is None:
            return
        try:
            mine = LocalRows(self.iteration.writer, tensors)
            worker = Worker(self.iteration.plan, tensors, mine)
            with disk_problems(self.iteration.output):
                for job in self.iteration.plan.jobs:
                    worker.do(job)
                mine.sync()
                if self._copy_towers:
                    self._copy_towers(self.iteration.writer)
        except BaseException as error:
            self.error = error


def complete(
    output: Output, step: int, sidecar_state: Fp8States | None, encodings: WeightEncodings | None, keep: int
) -> None:
    """Finish an iteration whose tensors are written: add the state and the encodings that travel beside them, give it
    its final name, make it the newest in its folder, and remove iterations beyond `keep`."""
    if sidecar_state:
        sidecar.write(output.partial / sidecar.RELATIVE, sidecar_state)
    if encodings:
        encodings_file.write(output.partial, encodings)
    output.commit()
    write_tracker(output.path.parent, step)
    prune(output.path.parent, step, keep)


def copy_towers(towers: Plan, source: Reader, writer: Writer) -> None:
    """Copy what the source has besides its text model, and sync it."""
    worker = Worker(towers, source, writer)
    for job in towers.jobs:
        worker.do(job)
    sync_all(chunk_files(writer, towers.targets))


def with_optimizer(plan: Plan, optimizer: Optimizer) -> Plan:
    """A model's plan with, for each kind, a job and an FP32 target for every parameter's tensor of the `optimizer`
    added: of all that programs have a place for."""
    jobs, targets = [*plan.jobs], dict(plan.targets)
    trained = [job for job in plan.jobs if not job.name.endswith(NOT_TRAINED)]
    for kind in (*KINDS, MOMENTUM):
        for job in trained:
            if kind not in kinds_of(job.name, len(plan.targets[job.name].shape), muon=optimizer.by_muon):
                continue
            write = state_name(kind, job.name)
            jobs.append(replace(job, name=write, reads=(write,), writes=(write,)))
            targets[write] = replace(plan.targets[job.name], dtype=DType.float32)
    return replace(plan, jobs=tuple(jobs), targets=targets)


def _live_model(run: Run) -> LiveModel:
    """The tensors that this rank saves: parameters and the optimizer's, by Megatron's names."""
    kinds: dict[str, Mapping[str, Tensor]] = {"": run.optimizer.parameters}
    kinds |= {state_name(kind, ""): tensors for kind, tensors in run.optimizer.tensors.items()}
    shards = {prefix + name: shard for prefix in kinds for name, shard in run.model.shards.saved.items()}
    tensors: Mapping[str, Tensor]
    if any(isinstance(tensors, LazyTensors) for tensors in kinds.values()):
        names = [(prefix, name) for prefix, tensors in kinds.items() for name in tensors]
        tensors = LazyTensors({prefix + name: partial(kinds[prefix].__getitem__, name) for prefix, name in names})
    else:
        tensors = {prefix + name: tensor for prefix, found in kinds.items() for name, tensor in found.items()}
    return LiveModel(run.model.model, tensors, shards=shards)


def _fp8_states(run: Run, carried: Fp8States | None) -> tuple[Fp8States | None, Fp8States | None]:
    """The state of the modules that compute in FP8 (from the recorder while the run computes in BF16), and the state
    that a BF16 run has collected, which continues what was `carried`."""
    recipe, recorded = run.recipe.precision.delayed, run.recorder.states() if run.recorder else {}
    linears = fp8_linears(run.model).items()
    modules = {name: state for name, linear in linears if (state := recorded.get(name) or linear.fp8_state())}
    fp8 = Fp8States(recipe, modules, producer=BY_RUN, iteration=run.step) if modules else None
    if run.recorder is None or run.recipe.precision.fp8:
        return fp8, None
    collected = Fp8States(recipe, recorded, producer=COLLECTED, iteration=run.step)
    if carried:
        collected = replace(collected, raw=carried.raw, statistics=carried.statistics)
    return fp8, collected


def _megatron_state(run: Run) -> CarriedRun:
    """Optimizer, schedule and counters in Megatron's form (optimizer.py, optimizer_param_scheduler.py: state_dict), and
    under our own keys random generator states and the optimizer's extra state."""
    settings = run.recipe.optimizer
    scheduler = megatron_scheduler(run.recipe, run.schedule, run.step)
    of_both: dict[str, Any] = {"lr": run.learning_rate(run.step + 1), "weight_decay": settings.weight_decay}
    of_both |= {"max_lr": scheduler["max_lr"], "min_lr": scheduler["min_lr"]}
    adam = {"betas": (settings.beta1, settings.beta2), "eps": settings.epsilon, **of_both}
    optimizer = adam_in_megatron(adam, run.optimizer.steps)
    if settings.by_muon:
        optimizer = muon_in_megatron({"momentum": settings.muon_momentum, **of_both}, optimizer)
    common = {"optimizer": optimizer, "opt_param_scheduler": scheduler}
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    objects: dict[str, Any] = {RNG: {"torch_rng_state": torch.get_rng_state(), "cuda_rng_state": cuda}}
    if run.optimizer.extra_state:
        objects[OPTIMIZER] = dict(run.optimizer.extra_state)
    args = training_args(run.recipe, run.schedule, run.position)
    args |= balance_args(run.model.balance) if run.model.model.moe else {}
    return CarriedRun(run.step, common, objects, args)
