"""Results whose weights are values, with the FP8 state that goes along."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.checkpoints.megatron.carried_run import (
    MEGATRON_NEEDS,
    NO_RUN,
    CarriedRun,
    carry_run,
    carry_trainer_run,
)
from precisionctl.checkpoints.megatron.directory import of_megatron
from precisionctl.checkpoints.other_trainers.trainer_run import ADAMW_SETTINGS, OF_THE_LOOP, of_trainer
from precisionctl.checkpoints.run_reader import muon_notes, run_of
from precisionctl.codes.statistics import scaling_words
from precisionctl.commands.build import Result
from precisionctl.commands.notes import (
    code_notes,
    decoded_notes,
    joined_notes,
    known_state_notes,
    narrowed_notes,
    payload_notes,
    stage_notes,
    state_notes,
    tower_notes,
)
from precisionctl.commands.run_precision import (
    RunPrecision,
    outdated_precision,
    precision_of_recipe,
    precision_of_run,
    precision_to_continue,
    settings_notes,
)
from precisionctl.commands.source import Source, with_masters
from precisionctl.commands.source_notes import decoded_base_notes, source_notes
from precisionctl.commands.storage import DCP, TORCH, TORCHTITAN, Storage
from precisionctl.conversion import manifest
from precisionctl.conversion.known_state import NOT_KNOWN
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, PrecisionError, RecipeError
from precisionctl.fp8.carry import amax_by_module, carry_state
from precisionctl.fp8.state import Fp8States
from precisionctl.megatron_flags import stateless_words, words_of_bf16
from precisionctl.planning.plan import check_fp8_gemms
from precisionctl.precision import PRESETS, Precision

_NO_PAYLOADS = ("--te-version changes nothing: the result has no state of Transformer Engine.",)


def as_values(source: Source) -> Result:
    """A result of values. Raises PrecisionError for weights that no FP8 GEMM takes, where it is to be trained in FP8,
    for codes that could not be made again, and what taking a run and its precision along raises."""
    plan, reader, known, encodings = source.plan, source.reader, source.known, source.encodings
    request = source.request
    storage, in_fp8 = request.storage, request.precision == "fp8"
    if encodings:
        _check_come_back(encodings, source)

    # the state that a run can start from, and what the sidecar carries along for a result from which none does
    fixed = None if request.drop_fp8_state else source.state_of_fixed_scales
    state = known.current or (fixed if in_fp8 else None)
    sidecar = known.current or fixed or known.outdated

    # the recipe by which the result is trained further: that of the run before, or one that was given, never both
    keeps_precision = request.precision == "keep" and not (state and state.of_gemms)
    before, not_known = _stateless_before(source) if keeps_precision else (_to_continue(source), ())
    if not keeps_precision and request.recipe is None:
        not_known = source.unknown_precision
    carried = _carried(source, before, state, keeps_state=sidecar is not None)
    recipe = before.precision if before else request.recipe
    stateless = recipe if recipe and not recipe.keeps_state else None
    if in_fp8:
        check_fp8_gemms(plan, precision_of_recipe(recipe, plan.model))

    live = request.fills_extra_state and (stateless is None if in_fp8 else state is not None)
    expert_ranks = None
    if live and plan.model.moe is not None and storage.container != TORCH:  # payloads are cut for each rank of experts
        expert_ranks = storage.parallelism.expert

    # what the run before leaves besides tensors: schedule, counters, and Megatron's arguments, which say a precision
    run = NO_RUN
    if source.run_reader and of_megatron(source.run_reader):  # rank files have no place for the states of generators
        run = carry_run(source.run_reader, storage.parallelism, generators=storage.container != TORCH)
    elif source.run_reader and of_trainer(source.run_reader):
        run = carry_trainer_run(source.run_reader, storage.parallelism)
    if storage.layout == "megatron":  # the Writer adds the words of `state`
        off = {} if keeps_precision else words_of_bf16(run.args)
        run = replace(
            run,
            args={**run.args, **off, **(stateless_words(stateless) if stateless else {})},
            precision_ahead=stateless is not None and not (before and before.trained),
        )

    notes = [
        *_notes(source, run),
        *(settings_notes(before, PRESETS["fp8-delayed"], before.precision) if in_fp8 and before else ()),
        *(_stateless_notes(stateless) if in_fp8 and stateless else ()),
        *_unsaid_notes(storage, carried, recipe),
        *not_known,
        *(state.notes if state else ()),
        *(payload_notes(storage.te_version, expert_ranks) if live else ()),
        *(_NO_PAYLOADS if storage.te_version != 2 and not live else ()),
        *known_state_notes(known, carried=sidecar is known.outdated and not live),
        *(code_notes(encodings) if reader.encodings and encodings else decoded_notes(reader)),
    ]
    states = partial(_live_state, source, state, recipe) if live else sidecar
    return Result(plan, notes, states, live, run, encodings, trained_in=carried)


def _check_come_back(encodings: WeightEncodings, source: Source) -> None:
    """Raise PrecisionError for codes, or wider values of them, that become values from which not all come back."""
    plan, specs = source.plan, source.reader.specs
    merged = next((name for name in encodings.weights if encodings.merges(name)), None)
    rounded = (
        plan.targets[write].dtype == DType.bfloat16
        and len(specs[read].shape) > 1
        and specs[read].dtype != DType.bfloat16
        for job in plan.jobs
        for read in job.reads
        if read in specs  # else it is of the optimizer, and no codes are of that
        for write in job.writes
    )
    if merged is not None and any(rounded):
        raise PrecisionError(
            f"INT8 codes with zero points do not survive BF16, e.g. of `{merged}`",
            do="Convert to values with --precision fp32, which gives the same codes again; or to BF16 with "
            "--drop-encodings, and without a way back.",
        )


def _notes(source: Source, run: CarriedRun) -> Iterator[str]:
    """Notes on the family, the vocabulary, the pipeline stages, and a run that comes along."""
    storage, plan, reader = source.request.storage, source.plan, source.reader
    yield from source_notes(source)
    yield from decoded_base_notes(reader)
    yield from narrowed_notes(reader, plan)
    yield from _master_notes(source)
    if source.request.dtype_of_values is None:
        yield from joined_notes(reader, plan)
    if storage.layout == "megatron":
        yield from tower_notes(plan)
        yield from stage_notes(plan.parallelism, plan.model.num_layers)
    if run.left:
        left = ", ".join(run.left)
        yield f"Not carried over from the run, as it belongs to ranks or to Megatron's own classes: {left}."
    if source.run_reader and of_megatron(source.run_reader) and storage.is_state_dict:
        schedule = "" if storage.container == TORCHTITAN else "the schedule of learning rates, "
        yield f"Not carried over from the run: {schedule}{', '.join(OF_THE_LOOP)}."

    defaults: dict[str, Any] = {}  # of settings that the source does not say, and that the result's loader needs
    if source.run_reader and storage.container in (DCP, TORCHTITAN):
        before, iteration = run_of(source.run_reader), source.run_reader.iteration
        if storage.container == DCP and iteration not in (None, before.updates):  # which has no place for it
            count = f"the result has Adam's count, {before.updates}"
            yield f"Not carried over from the run: its iteration, {iteration}; {count}."
        defaults |= before.defaults(ADAMW_SETTINGS)
        of_muon = muon_notes(source.run_reader, storage.container, plan.muon_rows)
        yield from (f"Muon goes on as torch.optim.Muon: {note}." for note in of_muon)
    elif source.run_reader and of_trainer(source.run_reader):
        defaults |= source.run_reader.trainer_run.defaults(MEGATRON_NEEDS if storage.layout == "megatron" else ())
    if "initial_lr" in defaults:
        rate = defaults.pop("initial_lr")
        yield f"The source does not say the rate before its schedule: the result's initial_lr is its lr, {rate:g}."
    if defaults:
        values = ", ".join(f"{key} {value}" for key, value in defaults.items())
        yield f"The source does not say all settings of its optimizer, and the result has PyTorch's defaults: {values}."
    if storage.container == TORCHTITAN:
        yield "Load it with `--checkpoint.exclude_from_loading dataloader`: the result has no state of the data."
    if source.run_reader and storage.container == TORCH:
        yield "Continue with --no-load-rng: the result has no states of random generators."


def _master_notes(source: Source) -> Iterator[str]:
    """A note on what weights of FP32 are, where the source has them in 16 bits beside an optimizer's masters."""
    storage, stored = source.request.storage, source.reader.specs.values()
    narrow = any(len(spec.shape) > 1 and spec.dtype != DType.float32 for spec in stored)
    if source.request.dtype_of_values != DType.float32 or storage.is_state_dict or not narrow:
        return
    if source.masters:
        yield "The weights are the optimizer's FP32 masters, of which the source's weights are the rounding."
    elif with_masters(source.reader):
        yield "The optimizer's FP32 masters stay behind, too: the weights are their rounding, as FP32."
    elif of_trainer(source.reader) and source.reader.unsupported_state:
        yield "FP32 masters, if the optimizer has any, stay behind with it: the weights are the stored ones, as FP32."


def _to_continue(source: Source) -> RunPrecision | None:
    """The precision of the run that wrote the source, in which a result for training in FP8 goes on, as `resume` would;
    None of other results, and if a recipe gives another. Raises as `precision_of_run`."""
    request = source.request
    if request.precision != "fp8" or request.recipe:
        return None
    with _advised():
        return precision_to_continue(source.reader, source.known, state_given=request.fp8_state is not None)


@contextmanager
def _advised() -> Iterator[None]:
    """A context in which words of a run that are not known here are refused with advice."""
    try:
        yield
    except (DamagedCheckpoint, RecipeError) as error:
        do = "--precision bf16 leaves the run's precision out."
        raise type(error)(error.what, where=error.where, do=do) from None


def _stateless_before(source: Source) -> tuple[RunPrecision | None, tuple[str, ...]]:
    """The precision of the run that wrote the source, if that keeps no state, else None; and a note where that run, of
    another version perhaps, says it in words not known here. Raises for those where the result takes the precision."""
    not_known: tuple[str, ...] = ()
    if source.request.storage.layout == "megatron":
        with _advised():
            before = precision_of_run(source.reader, source.known.weights_digest)
        not_known = outdated_precision(source.reader, source.known.weights_digest)
    else:
        before, not_known = source.run_precision, source.unknown_precision
    return (None if before is None or before.precision.keeps_state else before), not_known


def _carried(
    source: Source, before: RunPrecision | None, state: Fp8States | None, *, keeps_state: bool
) -> RunPrecision | None:
    """The precision of the run that wrote the source, for the manifest of the result; None where another one was asked
    for. `before` is that in which a result for training in FP8 goes on, and `state` what it starts from; one with
    another precision keeps that of a run in delayed scaling as long as it keeps its state (`keeps_state`)."""
    request, run = source.request, source.run_precision
    if run is None or request.recipe:
        return None
    if request.precision == "fp8":
        same = before is not None and before.precision.scaling == run.precision.scaling
        return replace(before, trained=run.trained) if before and same else None
    if request.precision == "keep" and not (state and state.of_gemms):
        return run
    return run if run.precision.keeps_state and keeps_state else None


def _unsaid_notes(storage: Storage, carried: RunPrecision | None, recipe: Precision | None) -> Iterator[str]:
    """What the files of a result do not say to other programs of the run before it, which is `carried` in its manifest
    alone, or of the `recipe` that was asked for."""
    precision = carried.precision if carried else recipe
    if precision is None:
        return
    option = f"`resume --precision {precision.option}`"
    if carried and storage.layout == "hf" and not precision.keeps_state:
        words = scaling_words(precision.scaling)
        what = f"The run was in {words}" if carried.trained else f"A run goes on in {words}, by {carried.said_by}"
        yield f"{what}: {option} goes on in it, by {manifest.RELATIVE}, which other programs do not read."
        return
    unsaid = ["precision.keep_bf16 " + ", ".join(precision.keep_bf16)] * bool(precision.keep_bf16)
    unsaid += ["precision.block.use_f32_scales"] * precision.f32_block_scales
    if precision.keeps_state:  # Megatron-Core refuses these beside delayed scaling (TransformerConfig)
        layers = {key: getattr(precision, key) for key in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")}
        unsaid += [f"precision.{key} {number}" for key, number in layers.items() if number]
    if carried and unsaid:
        yield f"Other programs are not told of {' and '.join(unsaid)}: {manifest.RELATIVE} says it to {option}."
        return
    unsaid += ["precision.schedule"] * bool(precision.schedule)
    if unsaid:
        yield f"Megatron has no arguments for {' and '.join(unsaid)}: `resume --set` gives them again."


def _stateless_notes(recipe: Precision) -> Iterator[str]:
    """What becomes of a recipe without state, which changes no tensor of a checkpoint for training."""
    yield (
        f"{scaling_words(recipe.scaling)} keeps no state, so the weights are those of --precision bf16. Megatron's "
        f"arguments in the result say the recipe: `resume --precision {recipe.option}` goes on in it."
    )


def _live_state(
    source: Source, state: Fp8States | None, recipe: Precision | None, weight_amax: Mapping[str, float]
) -> tuple[Fp8States, Sequence[str]]:
    """The state that a run will load, once the amaxes of weights are known: for the modules that carry state or, if the
    result is for training in FP8, for every FP8 GEMM of the recipe."""
    request, reader, gemms = source.request, source.reader, source.plan.gemms
    wanted: Callable[[str], bool] = (state.modules if state else {}).__contains__
    if request.precision == "fp8":
        wanted = precision_of_recipe(recipe, source.plan.model).in_fp8
    amax = amax_by_module(weight_amax, {module: shape for module, shape in gemms.items() if wanted(module)})
    keeps_own = state is not None and request.recipe is None
    change = carry_state(state, amax, recipe.delayed if recipe and not keeps_own else None)
    states = change.states
    if change.stale and not (reader.fp8 and reader.fp8.of_weights):  # nothing proves that the rest is valid
        states = replace(states, of_weights=NOT_KNOWN)
    elif state is None:
        states = replace(states, of_weights=source.weights_digest)
    return states, [*state_notes(change)]
