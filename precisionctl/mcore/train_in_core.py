"""`resume --engine megatron-core`: the same command, recipe, data and folder as the bundled trainer's, trained by
Megatron-Core with tensor, pipeline, context and expert parallelism."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from precisionctl.architectures.megatron.megatron_args import otherwise_in_megatron
from precisionctl.checkpoints.megatron.keys import directory_name
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.conversion.ranks import Ranks
from precisionctl.errors import EnvironmentProblem, RecipeError, UnknownArchitecture, require_package
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8States
from precisionctl.mcore import core_checkpoint
from precisionctl.mcore.core_log import core_log
from precisionctl.mcore.core_memory import core_changes, core_memory
from precisionctl.mcore.core_model import make_config
from precisionctl.mcore.core_muon import check_muon, require_muon
from precisionctl.mcore.core_run import CoreRun, CoreWorld, core_world
from precisionctl.mcore.stand_ins import stand_ins
from precisionctl.model.model_shape import ModelShape
from precisionctl.recipe import Recipe
from precisionctl.sizes import counted
from precisionctl.trainer.backends.te_version import version_parts
from precisionctl.trainer.data import Blend, OnTokens, Rows
from precisionctl.trainer.fp8_start import FC2_OF_EXPERTS, unused
from precisionctl.trainer.loop import OnStep
from precisionctl.trainer.measure.metrics import MetricsLog
from precisionctl.trainer.parallel.shards import check_divisions
from precisionctl.trainer.parallel.world import together
from precisionctl.trainer.preflight import checkpoint_bytes, require_disk_space, require_memory
from precisionctl.trainer.resume import Finished, Started, locked, read_data
from precisionctl.trainer.run_plan import RunPlan, TrainingEngine, plan_run
from precisionctl.trainer.saved import loading, run_folder
from precisionctl.trainer.settings import Settings, is_guarded, read_recipe
from precisionctl.trainer.stopping import SkippedSteps, agreed_stop, deadline, stop_signals

_OLDEST = (0, 16)


def resume(
    settings: Settings,
    on_start: Callable[[Started], None],
    on_step: OnStep,
    on_tokens: OnTokens = lambda count: None,
) -> Finished:
    """As `trainer.resume.resume`, with Megatron-Core. Raises EnvironmentProblem if it is not installed, and RecipeError
    for what it is not asked for here."""
    until = deadline(settings.time_limit)
    require_core()
    with together() as ranks, core_log() as log_goes_to, stand_ins():
        recipe = read_recipe(settings)
        plan = plan_run(settings, recipe, ranks.count, CORE)
        if recipe.optimizer.by_muon:
            require_muon(recipe.optimizer)
        with core_world(ranks, recipe) as world, locked(plan.out, world):
            log_goes_to(plan.out if world.first else None)
            return _train(plan, ranks, world, on_start, on_step, on_tokens, until)


def _check(plan: RunPlan, ranks: int) -> None:
    check(plan.settings, plan.recipe, ranks)
    check_model(plan.model, plan.recipe)
    check_muon(plan.model, plan.recipe)
    if plan.balance.pooled_loss:
        raise RecipeError(
            "router.pooled_loss is transformers' loss of all layers together, and Megatron-Core has one of each layer",
            do=f"Give --set router.pooled_loss=0 --set router.aux_loss={plan.balance.pooled_loss:g}.",
        )
    if plan.recipe.precision.fp8 and plan.backend != "te":
        raise EnvironmentProblem(
            f"{plan.recipe.precision.codes} in Megatron-Core is Transformer Engine's, and this machine does not run it",
            do="Give --precision bf16, or leave --engine out: the bundled trainer emulates it.",
        )
    if plan.recipe.parallel.context > 1 and plan.backend != "te":
        raise EnvironmentProblem(
            "context parallelism in Megatron-Core is Transformer Engine's, and this machine does not run it",
            do="Leave parallel.context out.",
        )


CORE = TrainingEngine(_check, core_memory, core_changes)
"""The engine Megatron-Core. Planning a run for it does not need megatron-core."""


def require_core() -> None:
    """Raise EnvironmentProblem if there is no megatron-core that this can use, or no psutil: processes that write its
    checkpoints ask for that, end without it, and are waited for (megatron-core 0.16.1, filesystem_async.py)."""
    needed = ".".join(map(str, _OLDEST))
    try:
        found = version("megatron-core")
    except PackageNotFoundError:
        found = ""
    if version_parts(found) < _OLDEST:
        raise EnvironmentProblem(
            f"--engine megatron-core needs megatron-core {needed} or newer, and {found or 'none'} is installed",
            do="pip install 'precisionctl[megatron]'",
        )
    require_package("psutil", "megatron", "a save of megatron-core")


def check(settings: Settings, recipe: Recipe, ranks: int) -> None:
    """Raise RecipeError for what Megatron-Core is not asked for here, and for parallel sizes that do not fit."""
    precision, fp8 = recipe.precision, recipe.precision.fp8
    in_bf16 = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    bundled_alone = {
        "a guard or precision.schedule": is_guarded(recipe),
        "--collect-amax": settings.collect_amax,
        "--fp8-state: give it to `convert`, and train from the result": settings.fp8_state is not None,
        "--cold-start": settings.cold_start,
        "data.held_out": bool(recipe.data.held_out),
        "data.packing": recipe.data.packing,
        "train.graphs": recipe.train.graphs,
        "train.weight_casts = per-update": recipe.train.weight_casts == "per-update",
        f"optimizer.preset = {recipe.optimizer.preset}": recipe.optimizer.preset == "fp8-lm",
        "parallel.replicate": recipe.parallel.replicate != 1,
        "parallel.gather": recipe.parallel.gather != "per-pass",
        "precision.keep_bf16": fp8 and bool(precision.keep_bf16),
        "precision.block.use_f32_scales": precision.f32_block_scales,
        "layers in BF16 under delayed scaling": fp8 and precision.keeps_state and any(in_bf16),
    }
    if asked := [what for what, is_asked in bundled_alone.items() if is_asked]:
        raise RecipeError(f"only the bundled trainer has {asked[0]}", do="Leave it out, or --engine megatron-core.")
    sizes = recipe.parallel
    each = sizes.tensor * sizes.pipeline * sizes.context
    if ranks % each or (ranks // sizes.pipeline) % (sizes.tensor * sizes.expert):
        raise RecipeError(
            f"{counted(ranks, 'rank')} cannot be divided into tensor {sizes.tensor} x pipeline {sizes.pipeline} x "
            f"context {sizes.context}, with experts on {sizes.expert}",
            do="tensor x pipeline x context must divide the ranks, and tensor x expert those of a pipeline stage.",
        )
    if recipe.train.batch_size % (ranks // each * recipe.train.micro_batch_size):
        raise RecipeError(
            f"train.batch_size {recipe.train.batch_size} cannot be divided evenly among {ranks // each} ranks in "
            f"passes of {recipe.train.micro_batch_size} rows",
            do=f"Choose a multiple of {ranks // each * recipe.train.micro_batch_size}.",
        )
    passes = recipe.train.batch_size // (ranks // each * recipe.train.micro_batch_size)
    if sizes.virtual > 1 and passes % sizes.pipeline:
        raise RecipeError(
            f"interleaved stages need passes in groups of {sizes.pipeline}, and an update has {passes}",
            do=f"Choose train.batch_size or train.micro_batch_size for a multiple of {sizes.pipeline} passes.",
        )


_BUNDLED = "Leave --engine out: the bundled trainer computes it as it is."


def check_model(model: ModelShape, recipe: Recipe) -> None:
    """Raise UnknownArchitecture for a model that Megatron-Core computes otherwise, or whose layers `make_stage` does
    not build; RecipeError for one that does not divide by the parallel sizes."""
    if other := otherwise_in_megatron(model):
        raise UnknownArchitecture(
            f"Megatron-Core computes `{model.architecture}` differently: {', '.join(other)}",
            do=_BUNDLED,
        )
    parts = {
        "Mamba-2 mixers": model.mamba,
        "gated delta nets": model.gdn,
        "indexers": model.dsa,
        "hyper-connections": model.mhc,
        "sizes of their own": model.heterogeneous,
    }
    if unbuilt := [part for part, has in parts.items() if has]:
        raise UnknownArchitecture(f"no layers with {unbuilt[0]} are built here in Megatron-Core", do=_BUNDLED)
    sizes = recipe.parallel
    if model.num_layers % (sizes.pipeline * sizes.virtual):
        what = f"{model.num_layers} layers cannot be divided into {sizes.pipeline * sizes.virtual}"
        raise RecipeError(what, do="Choose another parallel.pipeline or parallel.virtual.")
    check_divisions(model, sizes)
    if model.moe and model.add_bias_linear and sizes.tensor > 1:
        what = "experts with biases are not shared by tensor-parallel ranks in Megatron-Core"
        raise RecipeError(what, do=f"Leave parallel.tensor out. {_BUNDLED}")
    if model.moe and sizes.tensor > 1 and not sizes.sequence:
        what = "Megatron-Core trains experts on tensor-parallel ranks only if these share the tokens too"
        raise RecipeError(what, do="Give --set parallel.sequence=true, or leave parallel.tensor out.")
    if model.num_query_groups % sizes.tensor and sizes.tensor % model.num_query_groups:
        raise RecipeError(
            f"parallel.tensor is {sizes.tensor}, and there are {model.num_query_groups} groups of queries",
            do="One must divide the other: choose another parallel.tensor.",
        )


def _train(
    plan: RunPlan,
    ranks: Ranks,
    world: CoreWorld,
    on_start: Callable[[Started], None],
    on_step: OnStep,
    on_tokens: OnTokens,
    until: float,
) -> Finished:
    """Go on from the newest iteration in the run's folder, else from the source, to the recipe's last step."""
    recipe = replace(plan.recipe, precision=plan.recipe.precision.of_layers(plan.model.num_layers))
    ahead = CORE.look_ahead(plan.model, recipe, plan.backend, ranks.count)
    memory_notes = require_memory(ahead, recipe, world)
    disk = require_disk_space(checkpoint_bytes(plan.source, recipe.optimizer), recipe.train, plan.out)
    sizes = recipe.parallel
    rows, _ = read_data(plan, on_tokens, sizes.token_ranks * (2 * sizes.context if sizes.context > 1 else 1))
    identity = plan.identity_with(rows.fingerprint)
    te = plan.backend == "te"
    config = make_config(plan.model, recipe, plan.balance, te=te, dtype=torch.bfloat16, equal_rows=rows.has_equal_rows)
    newest = run_folder.newest(plan.out)
    sidecar_state, state_notes = _carried_state(plan, newest)
    begin = None if newest else _convert_source(plan, rows, ranks, world)
    run = CoreRun(recipe, plan.model, rows, world, plan.schedule, config, te=te)
    if newest:
        saved = run_folder.read_same(newest, identity, plan.out)
        core_checkpoint.load(run, newest, loading.trained_run(newest, recipe.optimizer).updates)
        run.step, run.position, run.skipped = saved.step, saved.position, SkippedSteps(**saved.skips)
    if begin:
        core_checkpoint.load(run, TorchDistReader(begin.folder), begin.updates)
        run.step, run.position = begin.step, begin.position
        world.barrier()
        if world.first:  # the first checkpoint takes its room
            shutil.rmtree(begin.folder)
    with ExitStack() as stack:
        log: MetricsLog | None = None
        if world.first:
            log = stack.enter_context(closing(MetricsLog(plan.out, run.step, recipe.tracking, asdict(recipe))))
            run.tokens = log.tokens
            notes = (*memory_notes, *_notes(plan, run.step, ranks.count), *state_notes, *rows.notes)
            on_start(Started(plan, run.step, newest is not None, disk, fp8={}, notes=notes))
        received = stack.enter_context(stop_signals())
        while run.step < recipe.train.steps:
            metrics = run.update()
            if log:
                log.write(metrics)
                on_step(metrics)
            asked = agreed_stop(world, received, until)
            is_saved, stop = run_folder.after_step(run.step, recipe.train, asked)
            if is_saved:
                if log:
                    log.sync()
                core_checkpoint.save(run, plan, identity, sidecar_state)
            if stop:
                return Finished(run.step, plan.out / directory_name(run.step), stop, world.first)
    return Finished(run.step, plan.out / directory_name(run.step), None, world.first)


def _carried_state(plan: RunPlan, newest: TorchDistReader | None) -> tuple[Fp8States | None, tuple[str, ...]]:
    """The FP8 state that the run does not use but saves again, and notes on it."""
    if newest:
        return sidecar.find(newest.path), ()
    path, known, delayed = plan.source.path, plan.known, plan.recipe.precision.keeps_state
    beside = sidecar.find(path) if path and "fp8" not in plan.skipped else None
    states, left = unused(known, beside, plan.mapping.gemms if delayed else ())
    current = known.current
    if delayed and current is None:
        left += (f"{known.why_none}: activations and gradients start at scale 1, as Megatron-Core has no warm-up",)
    elif delayed and plan.model.moe and current and not current.has_router_weights:
        left += (f"{FC2_OF_EXPERTS} before multiplication by the router's weights; Megatron-Core multiplies earlier",)
    return states, (*known.notes, *left)


@dataclass(frozen=True)
class _Begin:
    """Where a new run begins: the source, converted into `folder`, and after how many optimizer `updates` (None: from
    the weights alone), at which step and position in the data."""

    folder: Path
    updates: int | None
    step: int
    position: int


def _convert_source(plan: RunPlan, rows: Rows | Blend, ranks: Ranks, world: CoreWorld) -> _Begin:
    """Convert the source into the run's folder. Megatron-Core reads only one container, and each of its optimizers only
    its own layout in it. To be called before the model takes memory. What a killed run left there is made anew."""
    source, skipped, folder = plan.source, plan.skipped, plan.out / "start"
    step, position = loading.start_of(source, skipped, plan.recipe, rows)
    updates = None
    if "optimizer" not in skipped:
        assert loading.has_optimizer(source), "start_of has refused what has none"
        updates = loading.trained_run(source, plan.recipe.optimizer).updates
    if world.first:
        shutil.rmtree(folder, ignore_errors=True)
    world.barrier()
    given, dropped = plan.settings, updates is None
    made = Request(given.checkpoint, folder, "megatron", "bf16", drop_optimizer=dropped, reference=given.reference)
    if plan.recipe.precision.fp8:
        made = replace(made, precision="fp8", recipe=plan.recipe.precision)
        if "fp8" in skipped:  # encodings have fixed input scales, which would become state
            made = replace(made, drop_fp8_state=True, drop_encodings=True)
    execute(plan_command(made), restart=True, ranks=ranks)
    world.barrier()
    return _Begin(folder, updates, step, position)


def _notes(plan: RunPlan, begun: int, ranks: int) -> Iterator[str]:
    sizes = plan.recipe.parallel
    parts = {name: getattr(sizes, name) for name in ("tensor", "pipeline", "virtual", "context", "expert")}
    split = ", ".join(f"{name} {size}" for name, size in parts.items() if size > 1) or "data parallelism alone"
    yield f"megatron-core {version('megatron-core')} trains on {counted(ranks, 'rank')}: {split}"
    yield from plan.notes(begun)
    if plan.recipe.train.async_save:
        yield "train.async_save: Megatron-Core's checkpoints are written while the run waits"
