"""A planned run: settings, recipe and source, checked against each other and by the engine that is to train, before
data and tensors are read. `resume` begins with it, and `--dry-run` ends here."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import Reader
from precisionctl.commands.hints import open_hinted
from precisionctl.commands.run_precision import (
    outdated_precision,
    precision_to_continue,
    settings_notes,
    unknown_arguments,
)
from precisionctl.commands.source_notes import opened_notes
from precisionctl.conversion.known_state import KnownState, known_state
from precisionctl.errors import RecipeError
from precisionctl.model.model_shape import ModelShape
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Plan, check_fp8_gemms
from precisionctl.recipe import Data, Recipe
from precisionctl.tokens.tokenizer import open_tokenizer
from precisionctl.trainer.backends.choose import BackendName, choose_backend
from precisionctl.trainer.data import Blend, Rows
from precisionctl.trainer.data.rows import check_there
from precisionctl.trainer.measure.memory import estimate
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.model.router_balance import Balance
from precisionctl.trainer.optimizer import muon
from precisionctl.trainer.optimizer.learning_rate import misfit, rates_in_words
from precisionctl.trainer.optimizer.megatron_schedule import MegatronSchedule
from precisionctl.trainer.parallel import shards, world
from precisionctl.trainer.parallel.world import together
from precisionctl.trainer.preflight import (
    ChangesOf,
    DiskSpace,
    MemoryOf,
    Preflight,
    bundled_changes,
    checkpoint_bytes,
    disk_space,
    look_ahead,
)
from precisionctl.trainer.saved import loading, run_folder
from precisionctl.trainer.saved.balance import balance_notes, balance_of
from precisionctl.trainer.saved.loading import Load, StatePart
from precisionctl.trainer.settings import Settings, check_length, read_recipe


@dataclass(frozen=True)
class RunPlan:
    """A run without its data. `load` and `skipped` say what is loaded from the `source`, and `mapping` how its
    tensors become the model's. `schedule` is the source's if the run continues it, `known` the FP8 state to start
    from, and `balance` what keeps the loads of experts even. `precision_notes` say which settings of FP8 are the
    source's."""

    settings: Settings
    recipe: Recipe
    out: Path
    source: Reader
    mapping: Plan
    load: Load
    skipped: frozenset[StatePart]
    schedule: MegatronSchedule | None
    backend: BackendName
    known: KnownState
    balance: Balance
    precision_notes: tuple[str, ...]

    @property
    def model(self) -> ModelShape:
        return self.mapping.model

    @property
    def held_out(self) -> Data | None:
        """The recipe's held-out data; None if it has none."""
        data = self.recipe.data
        return replace(data, path=data.held_out, blend=(), packing=False) if data.held_out else None

    def notes(self, begun: int) -> Iterator[str]:
        """Notes for the user that apply to every engine, on a run after step `begun`. What is taken from the source is
        said only where the run begins: later it is in the run's own folder."""
        begins = not run_folder.steps_of(self.out)
        if begins:
            yield from self.precision_notes
        yield from self._rate_notes(begun, begins=begins)
        if begins:
            yield from opened_notes(self.settings.checkpoint, self.source)
            yield from loading.loading_notes(self.recipe, self.source, self.skipped)
        if self.source.fp8 is not None and not self.recipe.precision.fp8:
            collects, how = self.settings.collect_amax, "is carried along in the sidecar, unused"
            if "fp8" in self.skipped or (collects and self.known.outdated):
                how = "is left behind"
            elif collects:
                how = "goes on with what is collected"
            yield f"the checkpoint's FP8 state {how}"
        yield from balance_notes(self.model, self.balance)

    def _rate_notes(self, begun: int, *, begins: bool) -> Iterator[str]:
        """Notes on the learning rates of a run after step `begun`, and on a schedule that does not fit it. With --skip
        a run that does not begin would be another one."""
        recipe, source = self.recipe, self.source
        if begun >= recipe.train.steps:
            return
        rates = rates_in_words(begun, recipe, self.schedule)
        if self.schedule:
            skipping = "; --skip schedule takes the recipe's" if begins else ""
            yield f"learning rates: the checkpoint's ({self.schedule.words}): {rates}{skipping}"
            return
        peak = f"optimizer.lr {recipe.optimizer.lr:.2e}"
        yield f"learning rates: the recipe's {recipe.schedule.kind} of {peak}: {rates}"
        if "schedule" not in self.skipped and source.iteration and begins:
            set_here = loading.sets_rates(self.settings.overrides)
            why = "as --set says, " if set_here else ""
            if not why and run_folder.saved_of(source) is None:
                why = "as the checkpoint has none, "
            yield f"schedule: {why}the recipe's goes on after step {begun}; --skip schedule begins it at step 0"
            theirs = loading.others_run(source, self.skipped, recipe.optimizer)
            had = theirs.settings if theirs else {}
            if "lr" in had:
                before = had.get("initial_lr", had["lr"])
                first = f", and {before:.2e} before any schedule" if "initial_lr" in had else ""
                how = "" if set_here else f" (--set optimizer.lr={before:g} takes that in place of {peak})"
                yield f"the checkpoint's last learning rate was {had['lr']:.2e}{first}{how}"
        if problem := misfit(recipe):
            yield problem

    def identity_with(self, data: str) -> Mapping[str, Any]:
        """The identity of this run (`run_folder.identity`) with data of this fingerprint."""
        start = dict(self.settings.start) | ({"schedule": "the checkpoint's"} if self.schedule else {})
        return run_folder.identity(self.source, data, self.recipe, load=self.load, **start)


@dataclass(frozen=True)
class TrainingEngine:
    """An engine that trains: the parts of it that planning uses.

    `check` raises RecipeError for a plan that does not fit this many ranks, or asks for something that the engine
    lacks, EnvironmentProblem for what this machine does not run, and UnknownArchitecture for a model that it does not
    compute. `memory` is what a run takes on each rank, and `changes` what it can change to take less.
    """

    check: Callable[[RunPlan, int], None]
    memory: MemoryOf
    changes: ChangesOf

    def look_ahead(self, model: ModelShape, recipe: Recipe, backend: BackendName, ranks: int) -> Preflight:
        """As `preflight.look_ahead`."""
        return look_ahead(self.memory, self.changes, model, recipe, backend, ranks)


def _check_bundled(plan: RunPlan, ranks: int) -> None:
    recipe, model = plan.recipe, plan.model
    world.check(ranks, recipe)
    shards.check(model, recipe.parallel)
    muon.check(model, recipe.optimizer)
    check_graphs(recipe, model, plan.backend, ranks)
    GPT(model, recipe.precision.of_layers(model.num_layers), device="meta")  # takes no memory, and refuses the rest


BUNDLED = TrainingEngine(_check_bundled, estimate, bundled_changes)


def plan_run(settings: Settings, recipe: Recipe, ranks: int, engine: TrainingEngine = BUNDLED) -> RunPlan:
    """Plan a run on this many ranks, with every check that needs neither data nor tensors; nothing is written.

    Raises as `open_hinted`, `make_plan` and the engine's `check`, OutputError for a folder that the checkpoint is
    in, RecipeError for a recipe that does not fit the model, PrecisionError for GEMM sizes that FP8 does not take, and
    EnvironmentProblem for a backend that this machine does not have.
    """
    run_folder.check_place(settings.folder, settings.checkpoint)
    source = open_hinted(settings.checkpoint, reference=settings.reference)
    load, skipped = loading.what_to_load(source, settings.load, settings.skip)
    schedule = loading.schedule_of(source, skipped, settings.overrides)
    mapping = make_plan(source, "megatron")
    known = known_state(source, mapping.gemms, settings.fp8_state, drop="fp8" in skipped)
    recipe, notes = _as_before(settings, recipe, source, known)
    backend = choose_backend(settings.backend, recipe.precision)
    check_length(recipe, mapping.model)
    if settings.collect_amax:
        check_fp8_gemms(mapping, replace(recipe.precision.of_layers(mapping.model.num_layers), fp8=True))
    balance = balance_of(source, recipe.router)
    made = RunPlan(
        settings, recipe, settings.folder, source, mapping, load, skipped, schedule, backend, known, balance, notes
    )
    engine.check(made, ranks)
    return made


def _as_before(settings: Settings, recipe: Recipe, source: Reader, known: KnownState) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with the FP8 or NVFP4 settings of the run that wrote the source, and a note on those that differ. The
    recipe stays as it is if the user names it, or another scaling than that run's, and if amaxes, which are for delayed
    scaling, are collected after a run in another. Raises as `read_recipe` and `precision_to_continue`."""
    if settings.recipe is not None or not (recipe.precision.fp8 or settings.collect_amax):
        return recipe, ()
    before = precision_to_continue(source, known, state_given=settings.fp8_state is not None)
    if before is None:
        return recipe, (*outdated_precision(source, known.weights_digest), *unknown_arguments(source))
    if settings.collect_amax and not before.precision.keeps_state:
        return recipe, ()
    if before.precision.codes != recipe.precision.codes:
        return recipe, ()
    made = read_recipe(settings, before.keys)
    if made.precision.scaling != before.precision.scaling:
        return recipe, ()
    outdated = outdated_precision(source, known.weights_digest)
    return made, (*settings_notes(before, recipe.precision, made.precision), *outdated)


GRAPH_ROW = 128
"""Tokens of which a row has a multiple in a graph. For others TE computes attention there without cuDNN up to 9.15,
holds all scores, and rounds otherwise (fused_attn.cpp, nvte_get_fused_attn_backend_v2)."""


def check_graphs(recipe: Recipe, model: ModelShape, backend: BackendName, ranks: int) -> None:
    """Raise RecipeError, with the reason, if `train.graphs` is set and the layers of a run on this many ranks cannot be
    captured as CUDA graphs: a graph is replayed with fixed shapes and without help of the host."""
    reasons = {
        "Transformer Engine captures them on a GPU, and this run is emulated": backend != "te",
        "NVFP4 rounds gradients at random, which has not been tried in graphs": recipe.precision.fp8
        and recipe.precision.codes == "NVFP4",
        "ranks put parameters together for each pass": world.shards_parameters(ranks, recipe),
        "the host must know the sizes of the experts' GEMMs in each pass": model.moe is not None,
        "a layer takes more than the hidden states of the one before": bool(
            any(map(model.shares_kv, range(model.num_layers)))
            or model.per_layer_embed_dim
            or model.ple
            or model.attn_res_block_size
        ),
        "train.recompute computes layers again outside of them": recipe.train.recompute != "none",
        f"attention in a graph wants rows of a multiple of {GRAPH_ROW} tokens": bool(
            recipe.data.sequence_length % GRAPH_ROW
        ),
    }
    _refuse_graphs(recipe, [reason for reason, holds in reasons.items() if holds])


def check_graph_rows(recipe: Recipe, rows: Rows | Blend) -> None:
    """Raise RecipeError if `train.graphs` is set and the rows differ in shape."""
    reason = "rows of conversations, and texts that share rows, have another shape in each pass"
    _refuse_graphs(recipe, [] if rows.has_equal_rows else [reason])


def _refuse_graphs(recipe: Recipe, reasons: list[str]) -> None:
    if recipe.train.graphs and reasons:
        raise RecipeError(f"train.graphs asks for CUDA graphs of the layers, but {reasons[0]}", do="Leave it out.")


@dataclass(frozen=True)
class DryRun:
    """What a run would be. `continues` is True if its folder already has an iteration, at `step`. `on_first_rank` is
    True on the one rank that reports it."""

    plan: RunPlan
    step: int
    continues: bool
    ahead: Preflight
    disk: DiskSpace
    on_first_rank: bool


def dry_run(settings: Settings, engine: TrainingEngine = BUNDLED) -> DryRun:
    """What `resume` would do, without doing any of it: nothing is written, no data and no weights are read.

    Raises what `resume` raises before its first step, except for errors that depend on the contents of data or tensors,
    or on a package that is not installed. Memory and disk that do not suffice are part of what is returned.
    """
    with together() as ranks:
        plan = plan_run(settings, read_recipe(settings), ranks.count, engine)
        with open_tokenizer(plan.source.companions, plan.source.path) as tokenizer:
            for data in filter(None, (plan.recipe.data, plan.held_out)):
                for path in data.paths:
                    check_there(path, tokenizer)
        saved, train = run_in_folder(plan), plan.recipe.train
        step = saved.step if saved else loading.first_step(plan.source, plan.skipped, plan.recipe)
        ahead = engine.look_ahead(plan.model, plan.recipe, plan.backend, ranks.count)
        disk = disk_space(checkpoint_bytes(plan.source, plan.recipe.optimizer), train, plan.out)
        return DryRun(plan, step, saved is not None, ahead, disk, ranks.first)


def run_in_folder(plan: RunPlan) -> run_folder.Saved | None:
    """The run that is in the folder already, or None. Raises OutputError if it is another run; data, which is not read
    here, is not compared."""
    newest = run_folder.newest(plan.out)
    saved = run_folder.read_saved(newest.path) if newest else None
    if saved:
        run_folder.check_same(saved, plan.identity_with(saved.identity["data"]), plan.out)
    return saved
