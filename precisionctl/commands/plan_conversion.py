"""What `convert` is asked for, and how that is planned."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from precisionctl.checkpoints.base import Reader, Writer
from precisionctl.checkpoints.encodings_file import WeightEncodings
from precisionctl.checkpoints.huggingface import MAX_SHARD_SIZE
from precisionctl.checkpoints.megatron.carried_run import NO_RUN, CarriedRun, MegatronReader, carry_run, of_megatron
from precisionctl.checkpoints.output import Output
from precisionctl.commands.inference_export import InferenceExport
from precisionctl.commands.notes import (
    code_notes,
    companion_notes,
    decoded_notes,
    family_notes,
    known_state_notes,
    left_behind_notes,
    padding_notes,
    payload_notes,
    reencoding_notes,
    stage_notes,
    state_notes,
)
from precisionctl.commands.open_source import open_source
from precisionctl.commands.plan_export import plan_export_of
from precisionctl.commands.writers import CONTAINERS, hf_writer, megatron_writer
from precisionctl.conversion.known_state import NOT_KNOWN, KnownState, fixed_scales_hold, known_state
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.conversion.work import Finish, Work, digest_of, open_output
from precisionctl.errors import RecipeError
from precisionctl.export.export import plan_in_bf16
from precisionctl.export.input_scales import state_of_input_scales
from precisionctl.export.model_card import NAME
from precisionctl.export.reencode import make_reencoding, reencoding_card
from precisionctl.export.weight_encodings import weight_encodings
from precisionctl.fp8.carry import amax_by_module, carry_state
from precisionctl.fp8.extra_state_writer import TeVersion
from precisionctl.fp8.grouped import ColumnOrder
from precisionctl.fp8.state import Fp8States
from precisionctl.fp8.statistics import Scaling
from precisionctl.param import ONE_RANK, Layout, Parallelism
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Plan, check_fp8_gemms
from precisionctl.precision import PRESETS, Precision
from precisionctl.quant_methods.base import Scheme

PrecisionChoice = Literal["keep", "bf16", "fp32", "fp8"]
_VALUES: Mapping[PrecisionChoice, torch.dtype | None] = {
    "keep": None,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp8": torch.bfloat16,
}
"""Dtype of the values of a result; None: as stored, FP8 codes decoded to BF16."""


@dataclass(frozen=True)
class Conversion:
    """What to convert, and to what. `recipe` None keeps the recipe of a carried state, or takes TE's defaults.

    A plain Megatron checkpoint names no family, tokenizer or true vocabulary: `architecture` names the family, and
    `reference` is a Hugging Face directory of the same model, whose config.json and tokenizer are taken. `te_version`
    is that of the FP8 payloads written; `grouped_columns` the order of those read of experts that do not tell it.
    """

    source: Path
    destination: Path
    to: Layout
    precision: PrecisionChoice = "keep"
    container: str | None = None
    recipe: Precision | None = None
    parallelism: Parallelism = ONE_RANK
    iteration: int | None = None
    max_shard_size: int = MAX_SHARD_SIZE
    drop_fp8_state: bool = False
    fp8_state: Path | None = None
    drop_optimizer: bool = False
    architecture: str | None = None
    reference: Path | None = None
    te_version: TeVersion = 2
    grouped_columns: ColumnOrder | None = None

    def __post_init__(self) -> None:
        """Raises RecipeError for options that contradict one another."""
        if self.to == "hf" and self.parallelism != ONE_RANK:
            raise RecipeError("Hugging Face directories are not cut for ranks", do="Leave --tp and its like out.")
        if self.container not in (None, *CONTAINERS[self.to]):
            known = ", ".join(CONTAINERS[self.to])
            raise RecipeError(f"--to {self.to} is not written as {self.container}", do=f"Known: {known}.")
        if self.architecture is not None and self.reference is not None:
            raise RecipeError("--reference already says the family", do="Leave --architecture out.")
        if self.recipe is not None and self.precision != "fp8":
            raise RecipeError(
                "--recipe says how FP8 is made, but the result is not FP8",
                do="Give --precision fp8 too, or leave --recipe out.",
            )
        if self.drop_fp8_state and self.to == "hf" and self.precision == "fp8":
            raise RecipeError(
                "the input scales of FP8 weights come from the FP8 state",
                do="Leave --drop-fp8-state out, or use `export-inference --scheme dynamic`.",
            )
        if self.te_version != 2 and not self.fills_extra_state:
            raise RecipeError("the result holds no Transformer Engine state", do="Leave --te-version out.")
        if self.grouped_columns and self.to == "hf" and self.precision == "fp8":
            raise RecipeError("an export takes FP8 state as it is read", do="Convert with --grouped-columns first.")

    @property
    def fills_extra_state(self) -> bool:
        """Whether FP8 state goes where a run loads it from: delayed scaling keeps some, other recipes none."""
        delayed = self.recipe is None or self.recipe.keeps_state
        return self.to == "megatron" and self.precision in ("keep", "fp8") and delayed

    def numerics(self, plan: Plan) -> Precision:
        """The precision asked for, with patterns of layers resolved for the plan's model."""
        return (self.recipe or PRESETS["fp8-delayed"]).of_layers(plan.model.num_layers)


def plan_conversion(conversion: Conversion) -> Work:
    """Plan `convert`. FP8 weights for Hugging Face are the codes that they were before, where that is known, else those
    of an export. Raises what opening and planning raise, and DestinationExists.
    """
    reader = open_source(
        conversion.source,
        conversion.iteration,
        architecture=conversion.architecture,
        reference=conversion.reference,
        grouped_columns=conversion.grouped_columns,
    )
    encodings = None if conversion.drop_fp8_state else weight_encodings(reader)
    if conversion.to == "hf" and conversion.precision == "fp8":
        if encodings and encodings.quantization and conversion.recipe is None:
            return _plan_reencoding(conversion, reader, encodings)
        return plan_export_of(reader, encodings, _as_export(conversion))
    return _plan_values(conversion, reader, encodings)


def _plan_values(conversion: Conversion, reader: Reader, encodings: WeightEncodings | None) -> Work:
    """A result whose weights are values, with the FP8 state that goes along."""
    trained = _trained(reader) if conversion.to == "megatron" and not conversion.drop_optimizer else None
    plan = make_plan(
        reader,
        conversion.to,
        dtype=_VALUES[conversion.precision],
        parallelism=conversion.parallelism,
        optimizer=trained is not None,
    )
    known = _known_state(conversion, reader, plan)
    calibrated = None if known.current else state_of_input_scales(reader, encodings, plan)
    state = known.current or (calibrated if conversion.precision == "fp8" else None)
    beside = known.current or calibrated or known.outdated  # what no run is to start from goes into the sidecar
    if conversion.precision == "fp8":
        check_fp8_gemms(plan, conversion.numerics(plan))
    run = _carried(conversion, trained)
    output = open_output(conversion.destination, conversion.source, conversion.reference, conversion.fp8_state)
    makes = conversion.fills_extra_state and (conversion.precision == "fp8" or state is not None)
    writer = _writer(conversion, reader, plan, output, run, live=makes)
    notes = _notes(conversion, reader, plan, run if trained else None)
    notes += _fp8_notes(conversion, plan, state, payloads=makes)
    notes += known_state_notes(known, carried=beside is known.outdated and not makes)
    notes += code_notes(encodings) if reader.encodings and encodings else decoded_notes(reader)
    finish = _make_state(state, conversion, reader, plan, notes) if makes else lambda found: beside
    digest = digest_of(plan, conversion, conversion.fp8_state, encodings)
    return Work(reader, plan, writer, output, finish, digest, notes, makes, trained, encodings)


def _carried(conversion: Conversion, trained: MegatronReader | None) -> CarriedRun:
    """What comes along of the run that made the source; rank files have no place for the states of generators."""
    if trained is None:
        return NO_RUN
    return carry_run(trained, conversion.parallelism, generators=conversion.container != "torch")


def _writer(conversion: Conversion, reader: Reader, plan: Plan, output: Output, run: CarriedRun, live: bool) -> Writer:
    """The Writer of the container that was asked for. FP8 state that is `live` goes where a run loads it from, else
    into the sidecar."""
    if conversion.to == "hf":
        return hf_writer(
            output,
            plan,
            reader.companions,
            container=conversion.container,
            max_shard_size=conversion.max_shard_size,
        )
    return megatron_writer(
        output,
        plan,
        reader.companions,
        container=conversion.container,
        run=run,
        fp8_in="extra_state" if live else "sidecar",
        te=conversion.te_version,
    )


def _notes(conversion: Conversion, reader: Reader, plan: Plan, run: CarriedRun | None) -> list[str]:
    """Notes on the family, the vocabulary, the pipeline stages, and a run that comes along."""
    told = conversion.architecture is not None
    notes = [*family_notes(reader, conversion.to, told=told), *left_behind_notes(reader, carried=run is not None)]
    notes += companion_notes(reader)
    if of_megatron(reader):
        notes += padding_notes(reader.model, plan.model)
    notes += stage_notes(plan.parallelism, plan.model.num_layers)
    if run and run.left:
        notes.append(f"Stays behind, as it belongs to ranks or to Megatron's own classes: {', '.join(run.left)}.")
    if run and conversion.container == "torch":
        notes.append("Go on from it with --no-load-rng: the states of random generators are not in this format here.")
    return notes


def _fp8_notes(conversion: Conversion, plan: Plan, state: Fp8States | None, *, payloads: bool) -> Iterator[str]:
    """Notes on FP8 state: those of its reader, where some of it is from, and what TE asks for its `payloads`."""
    yield from state.notes if state else ()
    if payloads:
        cut = plan.model.moe is not None and conversion.container != "torch"
        yield from payload_notes(conversion.te_version, conversion.parallelism.expert if cut else None)


def _plan_reencoding(conversion: Conversion, reader: Reader, encodings: WeightEncodings) -> Work:
    """A result whose weights are the FP8 codes that they were once, or are."""
    known = _known_state(conversion, reader, plan_in_bf16(reader))
    made = make_reencoding(reader, encodings, known.current, fixed_hold=fixed_scales_hold(reader, encodings))
    output = open_output(conversion.destination, conversion.source, conversion.reference)
    writer = hf_writer(
        output,
        made.plan,
        reader.companions,
        container=conversion.container,
        export=made,
        max_shard_size=conversion.max_shard_size,
        files={NAME: reencoding_card(made, encodings, conversion.destination.name).text(reader)},
    )
    notes = [*left_behind_notes(reader), *companion_notes(reader), *known_state_notes(known, carried=True)]

    def finish(changed: Mapping[str, float]) -> Fp8States | None:
        notes.extend(reencoding_notes(encodings, made.codes, changed))
        return known.current or known.outdated

    digest = digest_of(made.plan, conversion, conversion.fp8_state, encodings)
    return Work(reader, made.plan, writer, output, finish, digest, notes, encodings=encodings)


def _known_state(conversion: Conversion, reader: Reader, plan: Plan) -> KnownState:
    recipe = conversion.recipe.delayed if conversion.recipe else None
    return known_state(reader, plan.gemms, conversion.fp8_state, recipe, drop=conversion.drop_fp8_state)


def _trained(reader: Reader) -> MegatronReader | None:
    """The reader, if it has an optimizer."""
    return reader if of_megatron(reader) and reader.optimizer_specs else None


_SCHEMES: Mapping[Scaling, Scheme] = {"delayed": "static", "current": "dynamic", "block": "block", "mxfp8": "mxfp8"}
"""The scheme in which an engine computes most like a recipe's scaling."""


def _as_export(conversion: Conversion) -> InferenceExport:
    """The export that FP8 weights for Hugging Face are, in the spelling that transformers and vLLM read."""
    return InferenceExport(
        conversion.source,
        conversion.destination,
        target="vllm",
        scheme=_SCHEMES[conversion.recipe.scaling if conversion.recipe else "delayed"],
        recipe=conversion.recipe,
        iteration=conversion.iteration,
        max_shard_size=conversion.max_shard_size,
        fp8_state=conversion.fp8_state,
    )


def _make_state(
    carried: Fp8States | None, conversion: Conversion, reader: Reader, plan: Plan, notes: list[str]
) -> Finish:
    """Makes the state that a run will load, once the weights' amaxes are known: of the modules that carry some, or,
    where the result is to be trained in FP8, of every FP8 GEMM."""
    recipe = conversion.recipe.delayed if conversion.recipe else None

    def make(weight_amax: Mapping[str, float]) -> Fp8States:
        known = carried.modules if carried else {}
        wanted = conversion.numerics(plan).in_fp8 if conversion.precision == "fp8" else known.__contains__
        amax = amax_by_module(weight_amax, {module: shape for module, shape in plan.gemms.items() if wanted(module)})
        change = carry_state(carried, amax, recipe)
        notes.extend(state_notes(change))
        if change.stale and not (reader.fp8 and reader.fp8.of_weights):  # then nothing proves the rest
            return replace(change.states, of_weights=NOT_KNOWN)
        return change.states if carried else replace(change.states, of_weights=digest_weights(reader))

    return make
