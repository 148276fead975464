"""`resume`: a checkpoint of either layout, a recipe and data become a run that can be killed at any step."""

import gc
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from precisionctl.checkpoints.megatron.keys import directory_name
from precisionctl.checkpoints.output import lock, open_kept
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.conversion.known_state import outdated_words
from precisionctl.errors import DataError, OutputError, PrecisionctlError
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Role
from precisionctl.recipe import Data
from precisionctl.tokens.tokenizer import open_tokenizer
from precisionctl.trainer.data import Blend, OnTokens, Rows
from precisionctl.trainer.fp8_start import Fp8Start, StateOrigin, continue_fp8, start_collecting, start_fp8
from precisionctl.trainer.guard import Guard
from precisionctl.trainer.loop import OnStep, train
from precisionctl.trainer.measure.metrics import MetricsLog
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.model.undrawn import Undrawn
from precisionctl.trainer.optimizer.adamw import MasterAdamW, RunOptimizer
from precisionctl.trainer.optimizer.fp8_lm import Fp8LmAdamW
from precisionctl.trainer.optimizer.muon import MasterMuon
from precisionctl.trainer.parallel.world import World, together, world
from precisionctl.trainer.preflight import (
    DiskSpace,
    checkpoint_bytes,
    require_disk_space,
    require_memory,
)
from precisionctl.trainer.rollback import Rollback, read_rollback, write_rollback
from precisionctl.trainer.run import Run
from precisionctl.trainer.run_plan import BUNDLED, RunPlan, check_graph_rows, plan_run
from precisionctl.trainer.saved import loading, run_folder
from precisionctl.trainer.saved.saving import Saver
from precisionctl.trainer.settings import Settings, is_guarded, read_recipe, tokenized_rows
from precisionctl.trainer.stopping import SkippedSteps, Stop, deadline


@dataclass(frozen=True)
class Started:
    """What the user sees before the first step. `continues` is True if the run continues from an iteration in its own
    folder. `fp8` has the number of GEMMs by where their state is from, then by role."""

    plan: RunPlan
    step: int
    continues: bool
    disk: DiskSpace
    fp8: Mapping[StateOrigin, Mapping[Role, int]]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Finished:
    """Where a run ended: at its last step, or earlier, for the reason `stopped`; its last `checkpoint` is saved either
    way. `on_first_rank` is True on the one rank that reports it."""

    step: int
    checkpoint: Path
    stopped: Stop | None
    on_first_rank: bool = True


def resume(
    settings: Settings,
    on_start: Callable[[Started], None],
    on_step: OnStep,
    on_tokens: OnTokens = lambda count: None,
) -> Finished:
    """Continue the run in `settings.out`, or start it from the checkpoint; train to the recipe's last step. Under
    torchrun all ranks do so together, and only the first calls the callbacks. After a rollback the run is built again
    from its folder.

    Raises RecipeError, DataError, OutputError (another run is in `out`), and as `open_checkpoint`. If several ranks
    fail, one raises the error and the others SystemExit.
    """
    until = deadline(settings.time_limit)
    with together() as ranks:
        recipe = read_recipe(settings)
        with world(ranks, recipe) as here:
            plan = plan_run(settings, recipe, ranks.count)
            with locked(plan.out, here):
                setup = _prepare(plan, here, on_tokens)
                while isinstance(ended := _attempt(setup, on_start, on_step, until), Rollback):
                    gc.collect()  # free the model before another one is built
                    if here.first:
                        write_rollback(plan.out, ended)
                    here.barrier()
                return ended


@contextmanager
def locked(out: Path, world: World) -> Iterator[None]:
    """Create and lock the run's folder, on the first rank: two runs must not write into one folder. If the run fails
    while a new folder holds only locks, or if its data is refused and it holds only tokens besides, the folder is
    removed again. With several ranks it stays, as another one may be writing into it."""
    if not world.first:
        world.barrier()
        yield
        return
    new = world.count == 1 and not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    with open_kept(out / "run.lock") as file:
        lock(file, OutputError("another process is training there", where=out, do="Wait for it, or stop it."))
        world.barrier()
        try:
            yield
        except PrecisionctlError as error:
            of_no_use = out / "tokens" if isinstance(error, DataError) else None
            inside = (path for path in out.rglob("*") if not path.is_dir() and path.suffix != ".lock")
            if new and all(of_no_use in file.parents for file in inside):
                shutil.rmtree(out)
            raise


@dataclass(frozen=True)
class _Setup:
    """A run's plan and its data, before model and optimizer are built. `identity` is as by `run_folder.identity`;
    `memory_notes` are about the memory that it will take."""

    plan: RunPlan
    world: World
    rows: Rows | Blend
    held_out_rows: Rows | Blend | None
    identity: Mapping[str, Any]
    memory_notes: tuple[str, ...]
    disk: DiskSpace


def _prepare(plan: RunPlan, world: World, on_tokens: OnTokens) -> _Setup:
    """Check memory and disk, and read the data. Raises EnvironmentProblem if the run does not fit into memory,
    DiskProblem if its checkpoints do not fit on the disk, and as `tokenized_rows`."""
    recipe, source = plan.recipe, plan.source
    memory_notes = require_memory(BUNDLED.look_ahead(plan.model, recipe, plan.backend, world.count), recipe, world)
    each = checkpoint_bytes(source, recipe.optimizer)
    require_disk_space(each, recipe.train, plan.out)  # before the data is tokenized, which may take long

    rows, held_out = read_data(plan, on_tokens, recipe.parallel.token_ranks)
    check_graph_rows(recipe, rows)
    disk = require_disk_space(each, recipe.train, plan.out)  # again, as the tokens are on the disk now
    return _Setup(
        plan=plan,
        world=world,
        rows=rows,
        held_out_rows=held_out,
        identity=plan.identity_with(rows.fingerprint),
        memory_notes=memory_notes,
        disk=disk,
    )


def read_data(plan: RunPlan, on_tokens: OnTokens, token_ranks: int) -> tuple[Rows | Blend, Rows | Blend | None]:
    """The rows to train on and those held out, for batches whose tokens are divided by this many ranks. Raises as
    `tokenized_rows`."""

    def read(data: Data) -> Rows | Blend:
        rows = tokenized_rows(data, tokenizer, plan.source.model, plan.out / "tokens", on_tokens)
        return rows.shared_by(token_ranks)

    source = plan.source
    with open_tokenizer(source.companions, source.path) as tokenizer:  # once, as a large vocabulary takes a second
        return read(plan.recipe.data), read(plan.held_out) if plan.held_out else None


def _attempt(setup: _Setup, on_start: Callable[[Started], None], on_step: OnStep, until: float) -> Finished | Rollback:
    """Train from the newest checkpoint in the run's folder (or the source) until the run ends or is rolled back."""
    plan = setup.plan
    out, source, newest = plan.out, plan.source, run_folder.newest(plan.out)
    rollback = read_rollback(out)
    run = _build(setup, rollback)
    fp8 = _continue(run, newest, setup, rollback) if newest else _start(run, setup)
    begun = run.step
    with ExitStack() as stack:
        log: MetricsLog | None = None
        if run.world.first:
            log = stack.enter_context(closing(MetricsLog(out, run.step, run.recipe.tracking, asdict(run.recipe))))
            rolled_back = (rollback.words,) if rollback else ()
            notes = (*rolled_back, *setup.memory_notes, *_notes(setup, run), *setup.rows.notes, *fp8.notes)
            on_start(Started(plan, run.step, newest is not None, setup.disk, fp8.counts, notes))
        saver = Saver(run, out, setup.identity, source, fp8.carried)
        ended = train(run, log, saver, on_step, until)
    if isinstance(ended, Rollback):
        return replace(ended, back_to=saver.newest if saver.newest is not None else begun)
    return Finished(run.step, out / directory_name(run.step), ended, setup.world.first)


def _build(setup: _Setup, rollback: Rollback | None) -> Run:
    plan = setup.plan
    model, recipe = plan.model, plan.recipe
    recipe = replace(recipe, precision=recipe.precision.of_layers(model.num_layers))
    torch.manual_seed(recipe.train.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recompute = recipe.train.recompute == "layer"
    with Undrawn():
        gpt = GPT(
            model, recipe.precision, plan.backend, torch.bfloat16, device, setup.world, recompute, balance=plan.balance
        )
    optimizer: RunOptimizer
    if recipe.optimizer.preset == "fp8-lm":
        optimizer = Fp8LmAdamW(gpt, recipe.optimizer, fused=plan.backend == "te")
    elif recipe.optimizer.by_muon:
        optimizer = MasterMuon(gpt, model, recipe.optimizer, gpt.shards)
    else:
        optimizer = MasterAdamW(gpt, recipe.optimizer, gpt.shards)
    return Run(
        recipe,
        gpt,
        optimizer,
        setup.rows,
        setup.held_out_rows,
        guard=Guard(recipe, rollback=rollback) if is_guarded(recipe) else None,
        world=setup.world,
        schedule=plan.schedule,
    )


def _continue(run: Run, newest: TorchDistReader, setup: _Setup, rollback: Rollback | None) -> Fp8Start:
    """Load everything from the newest iteration in the run's own folder."""
    saved = run_folder.read_same(newest, setup.identity, setup.plan.out)
    loading.load_rng(newest)
    loading.load_with_optimizer(newest, run)
    run.step, run.position, run.skipped = saved.step, saved.position, SkippedSteps(**saved.skips)
    if run.guard:
        run.guard = Guard(run.recipe, **(saved.guard or {}), in_fp8=saved.fp8 is not False, rollback=rollback)
    sidecar_state = sidecar.find(newest.path)
    if setup.plan.settings.collect_amax:
        return start_collecting(run, sidecar_state)
    return continue_fp8(run, newest.fp8, sidecar_state)


def _start(run: Run, setup: _Setup) -> Fp8Start:
    """Load the parts of the source that are not skipped, and set up the FP8 state to start with."""
    plan = setup.plan
    source = plan.source
    loading.load_run(run, source, plan.skipped)
    known, path = plan.known, source.path
    if plan.settings.collect_amax:
        started = start_collecting(run, known.current)
    else:
        sidecar_state = sidecar.find(path) if path and "fp8" not in plan.skipped else None
        started = start_fp8(run, known, sidecar_state, cold=plan.settings.cold_start)
    outdated: tuple[str, ...] = ()
    if known.outdated and (run.recipe.precision.fp8 or run.recorder):
        outdated = (f"{outdated_words(known.outdated)}: nothing starts from it",)
    return replace(started, notes=(*known.notes, *outdated, *started.notes))


def _notes(setup: _Setup, run: Run) -> Iterator[str]:
    yield from setup.plan.notes(run.step)
    yield from run.optimizer.notes(run.schedule.max_lr if run.schedule else run.recipe.optimizer.lr)
    if run.model.model.mtp_num_layers:
        yield "multi-token prediction layers are carried along as they are; nothing trains them"
    if (moe := run.model.model.moe) and moe.sparsemixer_eps:
        yield "experts are chosen as in evaluation: SparseMixer's sampling and noise are not computed"
    if run.model.model.stores_unused:
        yield "parameters that nothing reads are carried along as they are"
