"""A plan of Hugging Face's tensors as one of a GGUF file's: llama.cpp's names, orders of rows and types."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from precisionctl.architectures.param_map import filled
from precisionctl.checkpoints.gguf.families import FAMILIES
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.file_types import FILE_TYPES, MIXTURES, GgufType, Mixture, ValuesType
from precisionctl.checkpoints.gguf.writer import layer_and_name
from precisionctl.checkpoints.hf_directory.config_json import config_dtype
from precisionctl.checkpoints.hf_directory.fused_experts import stacked
from precisionctl.checkpoints.tensor_changes import Multiplied, Shape, TensorChange, factors_of
from precisionctl.codes.ggml_blocks import MXFP4, NVFP4, BlocksInRows, GgmlBlocks, blocks_of
from precisionctl.codes.ggml_formats import named
from precisionctl.codes.row_factors import RowFactors
from precisionctl.dtypes import DType
from precisionctl.errors import UnmappedTensor
from precisionctl.export.changed_parts import jobs_in_format
from precisionctl.export.gguf.k_quant_mixtures import types_in_mixture
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import TensorSpec, shared_spec, stack_and_slice
from precisionctl.planning.plan import Job, Plan

_STORED: Mapping[GgufType, DType | GgmlBlocks] = {
    "bf16": DType.bfloat16,
    "f16": DType.float16,
    "q8_0": blocks_of(named("Q8_0")),
    "q4_0": blocks_of(named("Q4_0")),
    "mxfp4": DType.bfloat16,
    "nvfp4": DType.bfloat16,
}

KEPT: Mapping[GgufType, BlocksInRows] = {"mxfp4": MXFP4, "nvfp4": NVFP4}
"""The types whose codes are kept."""

_IN_FP32 = re.compile(
    r"(?:.+_norm|.*\bffn_gate_inp(?:_shexp)?|position_embd|.+\.ssm_conv1d(?:_[qkv])?|.+\.shortconv\.conv|.+\.indexer\.proj"
    r"|.+\.altup_(?:correct|predict)_coef)\.weight"
)
"""Matrices that llama.cpp computes with in FP32 alone (conversion/base.py, prepare_tensors)."""


def type_of_values(plan: Plan) -> ValuesType:
    """The type of a file whose matrices stay values: FP16 of a model in FP16, else BF16."""
    return "f16" if config_dtype(plan.targets) == DType.float16.value else "bf16"


def hf_names(model: ModelShape) -> set[str]:
    """The names of Hugging Face's tensors in GGUF's table, of the first expert of each layer: of a family with several
    spellings they say which one a plan is to have."""
    family = FAMILIES.get(model.architecture)
    places = [{"layer": layer, "expert": 0, "mtp": 0} for layer in range(model.num_layers)]
    names = {filled(row.hf, place) for row in family.rows for place in places} if family else set()
    return {model.wrapper.name_of(name) for name in names} if model.wrapper else names


@dataclass(frozen=True)
class GgufPlan:
    """The plan of a GGUF file, and of its tensors that are codes of the source, or slices of such, which of the
    source's they are."""

    plan: Plan
    kept: Mapping[str, str]


def in_gguf(plan: Plan, kind: GgufType, codes: Collection[str]) -> GgufPlan:
    """The plan of a GGUF file of this type, in the order in which a file of Hugging Face's tensors has these. Copies of
    tied tensors, towers, and layers of prediction that llama.cpp does not compute, are not written. `plan` is one of
    values in Hugging Face's layout. `codes` are tensors of its source that are codes of `kind`.

    Raises UnmappedTensor for a tensor that llama.cpp has no name for.
    """
    model, family = plan.model, FAMILIES[plan.model.architecture].of(plan.model)
    kept = _kept(plan, family, kind, codes) if kind in KEPT else {}
    targets, factors = list[tuple[str, dict[str, Shape]]](), dict[str, RowFactors]()

    def made_of(job: Job, name: str) -> tuple[TensorChange, Sequence[str]]:
        alone = _alone(name, model)
        if (found := family.tensors.of_hf(alone, model)) is None:
            what = f"llama.cpp has no tensor for `{name}`"
            raise UnmappedTensor(what, do="Nothing is dropped in silence: does llama.cpp compute this part?")
        row, made = found
        shapes = row.change.part_shapes(plan.targets[name].shape, model)
        # the converter sorts by names of values; experts of gpt-oss have here the names that they have as codes
        order = alone.replace("_blocks[", "[")
        if family.down_last:
            order = re.sub(r"(?<=\.experts\.)(\d+)\.down_", r"\1.~down_", alone)
        targets.append((order, dict(zip(made, shapes, strict=True))))
        if products := factors_of(row.change, model):
            factors.update(dict.fromkeys(made, products))
        return row.change, made

    taken = (job for job in plan.text.jobs if not (job.row.of_prediction and family.without_prediction))
    jobs = [
        replace(job, factors={name: factors[name] for name in job.writes if name in factors})
        for job in jobs_in_format(taken, made_of)
    ]
    targets.sort(key=lambda each: (not each[1].keys() <= kept.keys(), each[0]))  # codes come first
    shapes = {name: shape for _, shapes in targets for name, shape in shapes.items()}
    mixture = next((each for each in MIXTURES if each == kind), None)
    usual = type_of_values(plan) if mixture else kind
    in_order = {
        name: _spec(shape, KEPT[kind] if name in kept else _stored_as(name, shape, usual))
        for name, shape in shapes.items()
    }
    if mixture:
        in_order = _in_mixture(mixture, family, model, in_order)
    return GgufPlan(replace(plan, jobs=tuple(jobs), targets=in_order), kept)


def _kept(plan: Plan, family: GgufFamily, kind: GgufType, codes: Collection[str]) -> dict[str, str]:
    """The tensors of a file that are codes of the source, each with its own there: of rows that only move, in whole
    blocks, with a global scale only where llama.cpp multiplies by one, and of a stack all slices or none."""
    kept, others, form = dict[str, str](), set[str](), KEPT[kind].format
    for job in plan.text.jobs:
        names, alike = job.writes[: len(job.row.hf)], len(job.reads) == len(job.row.hf)
        found = [family.tensors.of_hf(_alone(name, plan.model), plan.model) for name in names]
        rows = [each for each in found if each is not None]  # in_gguf refuses one that is not there
        keeps = (
            all(each in codes for each in job.reads)
            and job.row.moves_rows(plan.model)
            and all(row.change.moves_rows and not isinstance(row.change, Multiplied) for row, _ in rows)
            and not any(plan.targets[name].shape[-1] % form.values for name in names)
            and (not form.has_global_scale or alike and all(family.scales(name) for _, made in rows for name in made))
        )
        for number, (_, made) in enumerate(rows):
            if keeps:
                kept |= dict.fromkeys(made, job.reads[number if alike else 0])
            else:
                others |= {stack_and_slice(name)[0] for name in made}
    return {name: read for name, read in kept.items() if stack_and_slice(name)[0] not in others}


def _alone(name: str, model: ModelShape) -> str:
    """What the text model of a wrapper alone calls a tensor."""
    return model.wrapper.name_alone(name) if model.wrapper else name


def _spec(shape: Shape, stored: DType | BlocksInRows) -> TensorSpec:
    packed = isinstance(stored, BlocksInRows)
    return shared_spec(shape, DType.uint8, packing=stored) if packed else shared_spec(shape, stored)


def _in_mixture(
    mixture: Mixture, family: GgufFamily, model: ModelShape, values: Mapping[str, TensorSpec]
) -> dict[str, TensorSpec]:
    """The tensors of a file of K-quants, in its order, of those of a file of `values`."""
    metadata = {"general.architecture": family.architecture, **family.metadata(model, FILE_TYPES[mixture])}
    stacks = {name: spec.shape for name, spec in stacked(values, stack_and_slice).items()}
    types, found = types_in_mixture(mixture, metadata, stacks), dict[str, TensorSpec]()
    for name in sorted(values, key=lambda name: layer_and_name(stack_and_slice(name)[0])):  # slices keep their order
        form = named(types[stack]) if (stack := stack_and_slice(name)[0]) in types else None
        found[name] = _spec(values[name].shape, form.dtype or blocks_of(form)) if form else values[name]
    return found


def _stored_as(name: str, shape: Shape, kind: GgufType) -> DType | GgmlBlocks:
    """The dtype or blocks of a tensor: of vectors, norms and routers FP32, and FP16 where rows are no whole blocks."""
    stack, number = stack_and_slice(name)
    matrix = len(shape) + (number is not None) > 1 and stack.endswith(".weight")
    if not matrix or _IN_FP32.fullmatch(stack):
        return DType.float32
    stored = _STORED[kind]
    return DType.float16 if isinstance(stored, GgmlBlocks) and shape[-1] % stored.format.values else stored
