"""`resume`: a checkpoint of either layout, a recipe and data become a run that can be killed at any step."""

import fcntl
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from signal import Signals
from typing import Any, Literal

import torch

from precisionctl.cast import read_state
from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.megatron_dist import TorchDistReader
from precisionctl.checkpoints.megatron_keys import directory_name
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import OutputError, RecipeError
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8States, Role
from precisionctl.model_shape import ModelShape
from precisionctl.plan import check_fp8_gemms, make_plan
from precisionctl.recipe import Data, Recipe, load_recipe
from precisionctl.reencode import coded_before
from precisionctl.trainer import parts, run_folder, shares, state
from precisionctl.trainer.backend import BackendName, choose_backend
from precisionctl.trainer.data import Blend, OnTokens, Rows, load_data
from precisionctl.trainer.fp8_lm import Fp8LmAdamW
from precisionctl.trainer.guard import Guard
from precisionctl.trainer.loop import OnStep, Run, train
from precisionctl.trainer.metrics import MetricsLog
from precisionctl.trainer.model import GPT
from precisionctl.trainer.optim import MasterAdamW, RunOptimizer
from precisionctl.trainer.parts import Load, Part
from precisionctl.trainer.preflight import require_memory
from precisionctl.trainer.saving import Saver
from precisionctl.trainer.start import Fp8Start, Source, go_on_fp8, start_collecting, start_fp8
from precisionctl.trainer.tokenizer import load_tokenizer
from precisionctl.trainer.tracking import require
from precisionctl.trainer.world import World, together, world


@dataclass(frozen=True)
class Settings:
    """What the command line says. `load` None is full where the checkpoint has an optimizer; `skip` is left of it."""

    checkpoint: Path
    precision: Literal["bf16", "fp8"]
    data: Path | None = None
    out: Path | None = None
    recipe: str | None = None
    overrides: tuple[str, ...] = ()
    load: Load | None = None
    skip: tuple[Part, ...] = ()
    backend: Literal["auto", "te", "emulated"] = "auto"
    cold_start: bool = False
    collect_amax: bool = False
    fp8_state: Path | None = None
    shadow_every: int | None = None

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.out or Path(f"{self.checkpoint.resolve().name}-{self.precision}")

    @property
    def start(self) -> Mapping[str, object]:
        """What of it makes a run another one, beside checkpoint, data and recipe."""
        start: dict[str, object] = {"cold_start": self.cold_start}
        if self.skip:
            start["skip"] = sorted(set(self.skip))
        if self.collect_amax:
            start["collect_amax"] = True
        if self.fp8_state:
            with open(self.fp8_state, "rb") as file:
                start["fp8_state"] = hashlib.file_digest(file, "sha256").hexdigest()
        return start


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
    """Where a run ended: at its last step, or earlier by `signal`; `checkpoint` holds it either way. Of several ranks
    the first one `speaks`."""

    step: int
    checkpoint: Path
    signal: Signals | None
    speaks: bool = True


def resume(
    settings: Settings,
    on_start: Callable[[Started], None],
    on_step: OnStep,
    on_tokens: OnTokens = lambda count: None,
) -> Finished:
    """Go on with the run in `settings.out`, or start it from the checkpoint; train to the recipe's last step. Under
    torchrun all its ranks do so together, and the callbacks are the first one's.

    Raises RecipeError, DataError, OutputError (another run is in `out`), and what opening a checkpoint raises. Of
    several ranks one does; the others raise SystemExit.
    """
    with together() as ranks:
        recipe = read_recipe(settings)
        with world(ranks, recipe) as here:
            return _resume(settings, recipe, here, on_start, on_step, on_tokens)


def _resume(
    settings: Settings,
    recipe: Recipe,
    world: World,
    on_start: Callable[[Started], None],
    on_step: OnStep,
    on_tokens: OnTokens,
) -> Finished:
    out = settings.folder
    with _locked(out, settings.checkpoint, world):
        source = open_checkpoint(settings.checkpoint)
        load, skipped = parts.left(source, settings.load, settings.skip)
        schedule = parts.schedule_of(source, skipped, settings.overrides)
        plan = make_plan(source, "megatron")
        backend = choose_backend(settings.backend, recipe.precision)
        check_length(recipe, plan.model)
        memory = require_memory(plan.model, recipe, backend, world)
        rows = read_rows(source, recipe.data, out / "tokens", on_tokens)
        beside = replace(recipe.data, path=recipe.data.held_out, blend=(), packing=False)
        held_out = read_rows(source, beside, out / "tokens", on_tokens) if beside.path else None
        start = dict(settings.start) | ({"schedule": "the checkpoint's"} if schedule else {})
        wanted = run_folder.identity(source, rows.fingerprint, recipe, load=load, **start)
        here = run_folder.newest(out)
        if settings.collect_amax:
            to_come = replace(recipe.precision, fp8=True).of_layers(plan.model.num_layers)
            check_fp8_gemms(plan, to_come)
        given = read_state(settings.fp8_state, plan.gemms) if settings.fp8_state else None
        run = _build(recipe, plan.model, backend, rows, held_out, world)
        run.schedule = schedule
        if here:
            fp8 = _go_on(run, here, wanted, out, settings)
        else:
            fp8 = _start(run, source, skipped, settings, given)
        with _log(out, run) as log:
            if log:
                notes = (*memory, *_notes(source, skipped, run, settings), *rows.notes, *log.notes, *fp8.notes)
                on_start(Started(recipe, out, run.step, load, skipped, backend, fp8.counts, notes))
            saver = Saver(run, out, wanted, source.companions, fp8.carried, coded_before(source))
            received = train(run, log, saver, on_step)
        return Finished(run.step, out / directory_name(run.step), received, world.first)


@contextmanager
def _log(out: Path, run: Run) -> Iterator[MetricsLog | None]:
    """The first rank's."""
    if not run.world.first:
        yield None
        return
    with closing(MetricsLog(out, run.step, run.recipe.tracking, asdict(run.recipe))) as log:
        yield log


def read_recipe(settings: Settings) -> Recipe:
    """The recipe with what the command line says over it; without one, the plain recipe of the precision."""
    name = settings.recipe or {"bf16": "bf16", "fp8": "fp8-delayed"}[settings.precision]
    recipe = load_recipe(name, settings.overrides)
    recipe = replace(recipe, precision=replace(recipe.precision, fp8=settings.precision == "fp8"))
    if settings.shadow_every is not None:
        recipe = replace(recipe, guard=replace(recipe.guard, shadow_every=settings.shadow_every))
    if not recipe.precision.fp8 and (recipe.guard.shadow_every or recipe.precision.schedule):
        raise RecipeError(
            "a guard and a schedule of precisions are of an FP8 run, and this one is in BF16",
            do="Give --precision fp8, or leave out --shadow-every, guard.shadow_every and precision.schedule.",
        )
    stateful = recipe.precision.keeps_state
    asked = {"--cold-start empties": settings.cold_start, "--fp8-state is": settings.fp8_state}
    if not stateful and (wanted := [what for what, value in asked.items() if value]):
        raise RecipeError(
            f"{wanted[0]} the state of delayed scaling, and this run keeps none",
            do="Leave it out, or train in FP8 with precision.scaling=delayed.",
        )
    if settings.cold_start and settings.fp8_state:
        raise RecipeError("--cold-start takes no state, and --fp8-state gives one", do="Leave one of them out.")
    require(recipe.tracking)
    if settings.collect_amax and recipe.precision.fp8:
        raise RecipeError("an FP8 run records amaxes by itself", do="Leave --collect-amax out.")
    return with_data(recipe, settings.data)


def with_data(recipe: Recipe, path: Path | None) -> Recipe:
    """The recipe with the data that the command line names, if it names some. Raises RecipeError where nobody does."""
    if path:
        recipe = replace(recipe, data=replace(recipe.data, path=str(path), blend=()))
    if not (recipe.data.path or recipe.data.blend):
        raise RecipeError("no data to train on", do="Give --data PATH, or data.path or data.blend in the recipe.")
    return recipe


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
    with open(out / "run.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OutputError("another process is training there", where=out, do="Wait for it, or stop it.") from None
        world.meet()
        yield


def read_rows(
    source: Reader, data: Data, cache: Path | None = None, on_tokens: OnTokens = lambda count: None
) -> Rows | Blend:
    """What a recipe says to train on, in the tokens of a checkpoint's model, which are kept in `data.cache` or else in
    `cache`. Raises DataError."""
    place = Path(data.cache) if data.cache else cache
    rows = load_data(data, load_tokenizer(source.companions), place, on_tokens)
    rows.require_vocabulary(source.model.vocab_size)
    return rows


def check_length(recipe: Recipe, model: ModelShape) -> None:
    """Raise RecipeError for rows that the model has no positions for."""
    if recipe.data.sequence_length > model.max_position_embeddings:
        raise RecipeError(
            f"data.sequence_length {recipe.data.sequence_length} is beyond the model's {model.max_position_embeddings}",
            do=f"Give --set data.sequence_length={model.max_position_embeddings}.",
        )


def _build(
    recipe: Recipe,
    model: ModelShape,
    backend: BackendName,
    rows: Rows | Blend,
    held_out: Rows | Blend | None,
    world: World,
) -> Run:
    shares.check(model, recipe.parallel, backend)
    recipe = replace(recipe, precision=recipe.precision.of_layers(model.num_layers))
    torch.manual_seed(recipe.train.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recompute = recipe.train.recompute == "layer"
    gpt = GPT(model, recipe.precision, backend, torch.bfloat16, device, world=world, recompute=recompute)
    guarded = recipe.precision.fp8 and (recipe.guard.shadow_every or recipe.precision.schedule)
    guard = Guard(recipe) if guarded else None
    optimizer: RunOptimizer
    if recipe.optimizer.preset == "fp8-lm":
        optimizer = Fp8LmAdamW(gpt, recipe.optimizer, fused=backend == "te")
    else:
        optimizer = MasterAdamW(gpt, recipe.optimizer, gpt.shares)
    return Run(recipe, gpt, optimizer, rows, held_out, guard=guard, world=world)


def _go_on(run: Run, here: TorchDistReader, wanted: Mapping[str, Any], out: Path, settings: Settings) -> Fp8Start:
    """Exactly where the run was."""
    saved = run_folder.read_saved(here)
    assert saved is not None, "the newest iteration is ours"
    run_folder.check_same(saved, wanted, out)
    state.load_rng(here)
    assert state.has_optimizer(here), "so it has one"
    state.load_optimizer(here, run)
    run.step, run.position = saved.step, saved.position
    if run.guard and saved.guard:
        run.guard = Guard(run.recipe, **saved.guard)
    beside = sidecar.find(here.path)
    return start_collecting(run, beside) if settings.collect_amax else go_on_fp8(run, here.fp8, beside)


def _start(
    run: Run, source: Reader, skipped: Collection[Part], settings: Settings, given: Fp8States | None
) -> Fp8Start:
    parts.take(run, source, skipped)
    found = None if "fp8" in skipped else source.fp8
    if settings.collect_amax:
        return start_collecting(run, found)
    aside = sidecar.find(source.path) if source.path and "fp8" not in skipped else None
    return start_fp8(run, found, aside, given, cold=settings.cold_start)


def _notes(source: Reader, skipped: Collection[Part], run: Run, settings: Settings) -> Iterator[str]:
    yield from parts.notes(run, source, skipped, settings.overrides)
    yield from run.optimizer.notes(run.schedule.max_lr if run.schedule else run.recipe.optimizer.lr)
    if source.fp8 is not None and not run.recipe.precision.fp8:
        how = "goes on with what is collected" if run.recorder else "is carried along in the sidecar, unused"
        yield f"the checkpoint's FP8 state {'is left behind' if 'fp8' in skipped else how}"
    if run.model.model.mtp_num_layers:
        yield "multi-token prediction layers are carried along as they are; nothing trains them"
