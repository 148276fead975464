"""`resume`: a checkpoint of either layout, a recipe and data become a run that can be killed at any step."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from precisionctl.checkpoints.megatron.keys import directory_name
from precisionctl.checkpoints.output import lock, open_kept
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.conversion.known_state import KnownState, origin
from precisionctl.errors import OutputError
from precisionctl.export.weight_encodings import weight_encodings
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Role
from precisionctl.recipe import Data, Recipe
from precisionctl.trainer import graphs
from precisionctl.trainer.backends.choose import BackendName
from precisionctl.trainer.data import Blend, OnTokens, Rows
from precisionctl.trainer.data.tokenizer import load_tokenizer
from precisionctl.trainer.guard import Guard
from precisionctl.trainer.jump import Jump, read_jump, write_jump
from precisionctl.trainer.loop import train
from precisionctl.trainer.measure.metrics import MetricsLog
from precisionctl.trainer.measure.preflight import require_memory
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer.adamw import MasterAdamW, RunOptimizer
from precisionctl.trainer.optimizer.fp8_lm import Fp8LmAdamW
from precisionctl.trainer.parallel.world import World, together, world
from precisionctl.trainer.run import Run
from precisionctl.trainer.run_plan import RunPlan, plan_run
from precisionctl.trainer.saved import parts, run_folder, state
from precisionctl.trainer.saved.parts import Load, Part
from precisionctl.trainer.saved.room import Room, checkpoint_bytes, require_room
from precisionctl.trainer.saved.saving import Saver
from precisionctl.trainer.settings import Settings, is_guarded, read_recipe, read_rows
from precisionctl.trainer.skips import Skips
from precisionctl.trainer.start import Fp8Start, Source, go_on_fp8, start_collecting, start_fp8
from precisionctl.trainer.stopping import Stop
from precisionctl.trainer.telling import OnStep


@dataclass(frozen=True)
class Started:
    """What a user should see before the first step. `going_on` where it continues from an iteration of its own folder;
    `left` is what of the checkpoint was not taken; `fp8` counts roles by where their state is from."""

    recipe: Recipe
    out: Path
    step: int
    going_on: bool
    load: Load
    left: frozenset[Part]
    backend: BackendName
    room: Room
    fp8: Mapping[Source, Mapping[Role, int]]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Finished:
    """Where a run ended: at its last step, or earlier and why; `checkpoint` holds it either way. Of several ranks the
    first one `speaks`."""

    step: int
    checkpoint: Path
    stopped: Stop | None
    speaks: bool = True


def resume(
    settings: Settings,
    on_start: Callable[[Started], None],
    on_step: OnStep,
    on_tokens: OnTokens = lambda count: None,
) -> Finished:
    """Go on with the run in `settings.out`, or start it from the checkpoint; train to the recipe's last step. Under
    torchrun all its ranks do so together, and the callbacks are the first one's. Where the guard takes the run back,
    it starts once more.

    Raises RecipeError, DataError, OutputError (another run is in `out`), and what opening a checkpoint raises. Of
    several ranks one does; the others raise SystemExit.
    """
    limit = math.inf if settings.time_limit is None else settings.time_limit.total_seconds()
    until = time.monotonic() + limit
    with together() as ranks:
        recipe = read_recipe(settings)
        with world(ranks, recipe) as here:
            plan = plan_run(settings, recipe, ranks.count)
            with _locked(plan.out, here):
                setup = _prepare(plan, here, on_tokens)
                while isinstance(ended := _attempt(setup, on_start, on_step, until), Jump):
                    gc.collect()  # the model before it builds another one
                    if here.first:
                        write_jump(plan.out, ended)
                    here.meet()
                return ended


@dataclass(frozen=True)
class _Setup(RunPlan):
    """All of a run but how far it has come. `identity` tells it from others; `memory` is what there is to tell of the
    memory that it will take."""

    world: World
    rows: Rows | Blend
    held: Rows | Blend | None
    identity: Mapping[str, Any]
    memory: tuple[str, ...]
    room: Room


def _prepare(plan: RunPlan, world: World, on_tokens: OnTokens) -> _Setup:
    """Read the data. Raises what that raises, and EnvironmentProblem and DiskProblem where the run has no room in
    memory and its checkpoints none on the disk."""
    recipe, source = plan.recipe, plan.source
    memory = require_memory(plan.model, recipe, plan.backend, world)
    each = checkpoint_bytes(source)
    require_room(each, recipe.train, plan.out)  # before tokens are made, which may take long

    tokenizer = load_tokenizer(source.companions)  # once: a large vocabulary takes a second

    def read(data: Data) -> Rows | Blend:
        rows = read_rows(data, tokenizer, source.model, plan.out / "tokens", on_tokens)
        return rows.shared_by(recipe.parallel.token_ranks)

    rows = read(recipe.data)
    graphs.check_rows(recipe, rows)
    held_out = read(plan.held_out) if plan.held_out else None
    room = require_room(each, recipe.train, plan.out)  # beside them
    identity = plan.identity_with(rows.fingerprint)
    return _Setup(**vars(plan), world=world, rows=rows, held=held_out, identity=identity, memory=memory, room=room)


def _attempt(setup: _Setup, on_start: Callable[[Started], None], on_step: OnStep, until: float) -> Finished | Jump:
    """From the newest checkpoint in the run's folder to where it ends, or until it is taken back."""
    out, source, here = setup.out, setup.source, run_folder.newest(setup.out)
    jump = read_jump(out)
    run = _build(setup, jump)
    fp8 = _go_on(run, here, setup, jump) if here else _start(run, setup)
    begun = run.step
    with _log(out, run) as log:
        if log:
            told = (jump.words,) if jump else ()
            notes = (*told, *setup.memory, *_notes(setup, run), *setup.rows.notes, *log.notes, *fp8.notes)
            on_start(
                Started(
                    setup.recipe,
                    out,
                    run.step,
                    here is not None,
                    setup.load,
                    setup.skipped,
                    setup.backend,
                    setup.room,
                    fp8.counts,
                    notes,
                )
            )
        saver = Saver(run, out, setup.identity, source.companions, fp8.carried, weight_encodings(source))
        ended = train(run, log, saver, on_step, until)
    if isinstance(ended, Jump):
        return replace(ended, back_to=saver.newest if saver.newest is not None else begun)
    return Finished(run.step, out / directory_name(run.step), ended, setup.world.first)


@contextmanager
def _log(out: Path, run: Run) -> Iterator[MetricsLog | None]:
    """The first rank's."""
    if not run.world.first:
        yield None
        return
    with closing(MetricsLog(out, run.step, run.recipe.tracking, asdict(run.recipe))) as log:
        yield log


@contextmanager
def _locked(out: Path, world: World) -> Iterator[None]:
    """The run's folder, made and locked by the first rank: two runs must not write into one folder."""
    if not world.first:
        world.meet()
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with open_kept(out / "run.lock") as file:
        lock(file, OutputError("another process is training there", where=out, do="Wait for it, or stop it."))
        world.meet()
        yield


def _build(setup: _Setup, jump: Jump | None) -> Run:
    model, recipe = setup.model, setup.recipe
    recipe = replace(recipe, precision=recipe.precision.of_layers(model.num_layers))
    torch.manual_seed(recipe.train.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recompute = recipe.train.recompute == "layer"
    gpt = GPT(model, recipe.precision, setup.backend, torch.bfloat16, device, world=setup.world, recompute=recompute)
    guard = Guard(recipe, jump=jump) if is_guarded(recipe) else None
    optimizer: RunOptimizer
    if recipe.optimizer.preset == "fp8-lm":
        optimizer = Fp8LmAdamW(gpt, recipe.optimizer, fused=setup.backend == "te")
    else:
        optimizer = MasterAdamW(gpt, recipe.optimizer, gpt.shares)
    return Run(recipe, gpt, optimizer, setup.rows, setup.held, guard=guard, world=setup.world, schedule=setup.schedule)


def _go_on(run: Run, here: TorchDistReader, setup: _Setup, jump: Jump | None) -> Fp8Start:
    """Exactly where the run was."""
    saved = run_folder.read_saved(here)
    assert saved is not None, "the newest iteration is ours"
    run_folder.check_same(saved, setup.identity, setup.out)
    state.load_rng(here)
    assert state.has_optimizer(here), "so it has one"
    state.load_optimizer(here, run)
    run.step, run.position, run.skips = saved.step, saved.position, Skips(**saved.skips)
    if run.guard and saved.guard:
        run.guard = Guard(run.recipe, **saved.guard, jump=jump)
    beside = sidecar.find(here.path)
    return start_collecting(run, beside) if setup.settings.collect_amax else go_on_fp8(run, here.fp8, beside)


def _start(run: Run, setup: _Setup) -> Fp8Start:
    parts.take(run, setup.source, setup.skipped)
    if run.guard:
        run.guard.start(run.step)
    known, path = setup.known, setup.source.path
    if setup.settings.collect_amax:
        started = start_collecting(run, known.current)
    else:
        aside = sidecar.find(path) if path and "fp8" not in setup.skipped else None
        started = start_fp8(run, known, aside, cold=setup.settings.cold_start)
    return replace(started, notes=(*known.notes, *_outdated_notes(run, known), *started.notes))


def _outdated_notes(run: Run, known: KnownState) -> Iterator[str]:
    if known.outdated and (run.recipe.precision.fp8 or run.recorder):
        yield (
            f"the checkpoint's FP8 state ({origin(known.outdated)}) was recorded with other weights: "
            "nothing starts from it"
        )


def _notes(setup: _Setup, run: Run) -> Iterator[str]:
    yield from parts.notes(run, setup.source, setup.skipped, setup.settings.overrides)
    yield from run.optimizer.notes(run.schedule.max_lr if run.schedule else run.recipe.optimizer.lr)
    if setup.source.fp8 is not None and not run.recipe.precision.fp8:
        how = "goes on with what is collected" if run.recorder else "is carried along in the sidecar, unused"
        yield f"the checkpoint's FP8 state {'is left behind' if 'fp8' in setup.skipped else how}"
    if run.model.model.mtp_num_layers:
        yield "multi-token prediction layers are carried along as they are; nothing trains them"
