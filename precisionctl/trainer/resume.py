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

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.lock import lock
from precisionctl.checkpoints.megatron.keys import directory_name
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.errors import OutputError
from precisionctl.export.weight_encodings import weight_encodings
from precisionctl.fp8 import sidecar
from precisionctl.fp8.carry import read_state
from precisionctl.fp8.state import Fp8States, Role
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Plan, check_fp8_gemms
from precisionctl.recipe import Recipe
from precisionctl.trainer import graphs
from precisionctl.trainer.backends.choose import BackendName, choose_backend
from precisionctl.trainer.data import Blend, OnTokens, Rows
from precisionctl.trainer.guard import Guard
from precisionctl.trainer.jump import Jump, read_jump, write_jump
from precisionctl.trainer.loop import train
from precisionctl.trainer.measure.metrics import MetricsLog
from precisionctl.trainer.measure.preflight import require_memory
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer.adamw import MasterAdamW, RunOptimizer
from precisionctl.trainer.optimizer.fp8_lm import Fp8LmAdamW
from precisionctl.trainer.optimizer.megatron_schedule import MegatronSchedule
from precisionctl.trainer.parallel import shares
from precisionctl.trainer.parallel.world import World, together, world
from precisionctl.trainer.run import Run
from precisionctl.trainer.saved import parts, run_folder, state
from precisionctl.trainer.saved.parts import Load, Part
from precisionctl.trainer.saved.saving import Saver
from precisionctl.trainer.settings import Settings, check_length, is_guarded, read_recipe, read_rows
from precisionctl.trainer.skips import Skips
from precisionctl.trainer.start import Fp8Start, Source, go_on_fp8, start_collecting, start_fp8
from precisionctl.trainer.stopping import Stop
from precisionctl.trainer.telling import OnStep


@dataclass(frozen=True)
class Started:
    """What a user should see before the first step. `left` is what of the checkpoint was not taken; `fp8` counts roles
    by where their state is from."""

    recipe: Recipe
    out: Path
    step: int
    load: Load
    left: frozenset[Part]
    backend: BackendName
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
        out = settings.folder
        with world(ranks, recipe) as here, _locked(out, settings.checkpoint, here):
            setup = _prepare(settings, recipe, here, out, on_tokens)
            while isinstance(ended := _attempt(setup, on_start, on_step, until), Jump):
                gc.collect()  # the model before it builds another one
                if here.first:
                    write_jump(out, ended)
                here.meet()
            return ended


@dataclass(frozen=True)
class _Setup:
    """All of a run but how far it has come. `load` and `skipped` say what is taken from the `source`, `plan` how its
    tensors become the model's. `identity` tells this run from others; `given` is the FP8 state of the file that the
    command names, `memory` what there is to tell of the memory it will take."""

    settings: Settings
    recipe: Recipe
    world: World
    out: Path
    source: Reader
    plan: Plan
    load: Load
    skipped: frozenset[Part]
    schedule: MegatronSchedule | None
    rows: Rows | Blend
    held_out: Rows | Blend | None
    identity: Mapping[str, Any]
    backend: BackendName
    given: Fp8States | None
    memory: tuple[str, ...]


def _prepare(settings: Settings, recipe: Recipe, world: World, out: Path, on_tokens: OnTokens) -> _Setup:
    """Read and check all that can be without building the model. Raises what reading raises, RecipeError for a recipe
    that does not fit the model, and EnvironmentProblem where the run does not fit into memory."""
    source = open_checkpoint(settings.checkpoint)
    load, skipped = parts.left(source, settings.load, settings.skip)
    schedule = parts.schedule_of(source, skipped, settings.overrides)
    plan = make_plan(source, "megatron")
    backend = choose_backend(settings.backend, recipe.precision)
    check_length(recipe, plan.model)
    shares.check(plan.model, recipe.parallel)
    memory = require_memory(plan.model, recipe, backend, world)
    rows = read_rows(source, recipe.data, out / "tokens", on_tokens)
    beside = replace(recipe.data, path=recipe.data.held_out, blend=(), packing=False)
    held_out = read_rows(source, beside, out / "tokens", on_tokens) if beside.path else None
    rows = rows.shared_by(recipe.parallel.token_ranks)
    held_out = held_out and held_out.shared_by(recipe.parallel.token_ranks)
    graphs.check(recipe, plan.model, backend, world, rows)
    start = dict(settings.start) | ({"schedule": "the checkpoint's"} if schedule else {})
    identity = run_folder.identity(source, rows.fingerprint, recipe, load=load, **start)
    if settings.collect_amax:
        check_fp8_gemms(plan, replace(recipe.precision, fp8=True).of_layers(plan.model.num_layers))
    given = read_state(settings.fp8_state, plan.gemms) if settings.fp8_state else None
    return _Setup(
        settings,
        recipe,
        world,
        out,
        source,
        plan,
        load,
        skipped,
        schedule,
        rows,
        held_out,
        identity,
        backend,
        given,
        tuple(memory),
    )


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
            on_start(Started(setup.recipe, out, run.step, setup.load, setup.skipped, setup.backend, fp8.counts, notes))
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
def _locked(out: Path, checkpoint: Path, world: World) -> Iterator[None]:
    """The run's folder, made and locked by the first rank: two runs must not write into one folder."""
    if out.resolve() in (checkpoint.resolve(), *checkpoint.resolve().parents):
        raise OutputError(
            "--out is where the checkpoint itself is, and a source is never written to",
            where=out,
            do="Choose another --out. To go on with a run, give the checkpoint that it was started from.",
        )
    if not world.first:
        world.meet()
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "run.lock", "w") as file:
        lock(file, OutputError("another process is training there", where=out, do="Wait for it, or stop it."))
        world.meet()
        yield


def _build(setup: _Setup, jump: Jump | None) -> Run:
    model, recipe = setup.plan.model, setup.recipe
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
    return Run(
        recipe, gpt, optimizer, setup.rows, setup.held_out, guard=guard, world=setup.world, schedule=setup.schedule
    )


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
    with_fp8 = "fp8" not in setup.skipped
    found = setup.source.fp8 if with_fp8 else None
    if setup.settings.collect_amax:
        return start_collecting(run, found)
    aside = sidecar.find(setup.source.path) if setup.source.path and with_fp8 else None
    return start_fp8(run, found, aside, setup.given, cold=setup.settings.cold_start)


def _notes(setup: _Setup, run: Run) -> Iterator[str]:
    yield from parts.notes(run, setup.source, setup.skipped, setup.settings.overrides)
    yield from run.optimizer.notes(run.schedule.max_lr if run.schedule else run.recipe.optimizer.lr)
    if setup.source.fp8 is not None and not run.recipe.precision.fp8:
        how = "goes on with what is collected" if run.recorder else "is carried along in the sidecar, unused"
        yield f"the checkpoint's FP8 state {'is left behind' if 'fp8' in setup.skipped else how}"
    if run.model.model.mtp_num_layers:
        yield "multi-token prediction layers are carried along as they are; nothing trains them"
