"""The way back to FP8: a checkpoint whose weights were codes once becomes the directory of codes that it was.

How they were coded travels beside the values, by Hugging Face name, so that what a conversion does to rows in between
need not be done to scales. Only where the codes that are read have other names (Megatron's, or those of experts stored
as one tensor) are scales moved as their rows are.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from precisionctl.checkpoints import encodings_file
from precisionctl.checkpoints.base import Chunk, Reader, read_tensor, whole
from precisionctl.checkpoints.encodings_file import Coded
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.errors import MappingError, PrecisionError
from precisionctl.export.export import Export
from precisionctl.fp8.carry import FIXED_SCALES
from precisionctl.fp8.encoding import Encoding, by_rows, grid_shape, of_rows
from precisionctl.fp8.numerics import FP8_MAX, after_one_update, recorded_amax
from precisionctl.fp8.state import DelayedScaling, Fp8State, Fp8States
from precisionctl.param import TensorSpec
from precisionctl.planning.encode import Encode
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Job, Plan
from precisionctl.quant_methods.base import CODES, POWERS_OF_2, Said, Scales, recognise, sibling, sized

_TWO_ROUNDINGS = 2.0**-22
"""What an amax may be off by that a scale was made of, and which was taken from that scale again: a history of one row,
Megatron's default, keeps it so."""


def coded_before(reader: Reader) -> Coded | None:
    """How a checkpoint's weights are coded, or were: by the names that a Hugging Face directory has for them when it
    is written. None where nothing is known of that."""
    coded = coded_as_stored(reader)
    renamed = reader.layout == "megatron" or any(name.endswith("]") for name in reader.encodings)
    return _moved(reader, coded) if reader.encodings and renamed else coded


def coded_as_stored(reader: Reader) -> Coded | None:
    """What a checkpoint's own files say of that, with no scale moved."""
    if isinstance(reader, HuggingFaceReader):
        return reader.coded
    return encodings_file.find(reader.path) if reader.path and not reader.encodings else None


def _moved(reader: Reader, coded: Coded | None) -> Coded:
    """The encodings of codes under other names: scales moved as their rows are."""
    method = recognise({"quantization_config": coded.quantization}) if coded else None
    kinds = (method.weight_scales[0], method.input_scales[0]) if method else ("weight_scale", "input_scale")
    weights: dict[str, TensorSpec] = {}
    scales: dict[str, Scales] = {}
    plan = make_plan(reader, "hf", respelled=True)
    stored = _Moved(reader, plan)
    for job in plan.jobs:
        if not any(name in reader.encodings for name in job.reads):
            continue
        if not all(name in reader.encodings for name in job.reads) or not job.row.moves(plan.model):
            continue  # there is no row of the result of which it could be said how it was coded
        given = [coded.input_scale(name) for name in job.reads] if coded else [None]
        for name, encoding in zip(job.writes, _encodings(reader, job, plan), strict=False):
            shape = plan.targets[name].shape
            weights[name] = TensorSpec(shape, encoding.dtype)
            scales[name] = Scales(
                sibling(name, kinds[0]), sibling(name, kinds[1]) if given[0] is not None else None, encoding.block
            )
            stored.add(scales[name].weight, encoding.scale_inv, job, name)
            if (fixed := scales[name].input) is not None:
                stored.add_fixed(fixed, max(value for value in given if value is not None))
    quantization, files = (coded.quantization, coded.files) if coded else ({}, {})
    return Coded(weights, scales, stored, quantization, files)


def _encodings(reader: Reader, job: Job, plan: Plan) -> list[Encoding]:
    """Of each tensor that a job writes."""
    read = [reader.encodings[name] for name in job.reads]
    parts = [by_rows(encoding, reader.specs[name].rows) for name, encoding in zip(job.reads, read, strict=True)]
    whole_grid = parts[0] if plan.source == "megatron" else job.row.source.merge(parts, plan.model)
    grids = job.row.split(whole_grid, plan.model)
    columns = [plan.targets[name].columns for name in job.writes]
    return [of_rows(read[0].dtype, grid, read[0], wide) for grid, wide in zip(grids, columns, strict=False)]


class _Moved:
    """The scales of codes under other names, moved whenever they are asked for: the grids of a large model are
    gigabytes. Those of the last job are kept."""

    def __init__(self, reader: Reader, plan: Plan) -> None:
        self.specs: dict[str, TensorSpec] = {}
        self._reader, self._plan = reader, plan
        self._jobs: dict[str, tuple[Job, str]] = {}
        self._fixed: dict[str, Tensor] = {}
        self._last: tuple[Job, dict[str, Tensor]] | None = None

    def add(self, name: str, scale_inv: Tensor, job: Job, weight: str) -> None:
        """The scales of a weight that a job writes, seen once to know their shape."""
        self.specs[name] = TensorSpec(tuple(scale_inv.shape), scale_inv.dtype)
        self._jobs[name] = job, weight

    def add_fixed(self, name: str, value: float) -> None:
        """The fixed scale of a weight's input."""
        self._fixed[name] = torch.tensor(value)
        self.specs[name] = TensorSpec((), torch.float32)

    def chunks(self, name: str) -> Sequence[Chunk]:
        place = self._fixed[name] if name in self._fixed else self._grid(*self._jobs[name])
        return [Chunk(whole(self.specs[name]), place)]

    def _grid(self, job: Job, weight: str) -> Tensor:
        if self._last is None or self._last[0] is not job:
            encodings = zip(job.writes, _encodings(self._reader, job, self._plan), strict=False)
            self._last = job, {name: encoding.scale_inv.contiguous() for name, encoding in encodings}
        return self._last[1][weight]


def make_reencoding(source: Reader, coded: Coded, states: Fp8States | None) -> Export:
    """Plan the directory that `coded` was read from, of the values that are here now; `states` have what was recorded.

    A weight that is what it was gets the codes that it had; blocks that have changed get new scales, and keep their
    size. Everything that was no code is in BF16. Raises MappingError where `coded` is of another model.
    """
    plan = make_plan(source, "hf", dtype=torch.bfloat16, respelled=True)
    method = recognise({"quantization_config": coded.quantization})
    assert method is not None, "codes of a Hugging Face directory have a method"
    said = method.says(coded.quantization)
    check_model(coded, plan)
    jobs = [replace(job, encode=_encode(job, coded, said, states)) for job in plan.jobs]
    _add_constants(jobs, coded)
    targets: dict[str, TensorSpec] = {}
    for name, spec in plan.targets.items():
        targets[name] = replace(spec, dtype=coded.weights[name].dtype) if name in coded.weights else spec
        if name in coded.weights:
            targets[coded.scales[name].weight] = _scale_spec(name, coded, said)
    for job in jobs:
        targets |= {name: coded.stored.specs[name] for name in (job.encode.input_scales if job.encode else ())}
    made = replace(plan, jobs=tuple(jobs), targets=targets, quantization=coded.quantization)
    return Export(made, coded.quantization, coded.files)


def check_model(coded: Coded, plan: Plan) -> None:
    """Raises MappingError where encodings are of another model than a plan's Hugging Face tensors."""
    for name, spec in coded.weights.items():
        if name not in plan.targets or plan.targets[name].shape != spec.shape:
            raise MappingError(
                f"the encodings are of a `{name}` of {list(spec.shape)}, which this model does not have",
                where=coded.path,
                do="Are they of another model? Then remove the file; it is no part of the model.",
            )


def _encode(job: Job, coded: Coded, said: Said, states: Fp8States | None) -> Encode | None:
    names = [name for name in job.writes if name in coded.weights]
    if not names:
        return None
    return Encode(
        blocks={name: _block(name, coded, said) for name in names},
        weight_scales={name: coded.scales[name].weight for name in names},
        input_scales=_input_scales(names, coded, states, job),
        power_of_2=in_powers_of_2(coded),
    )


def in_powers_of_2(coded: Coded) -> bool:
    """Whether all scales of blocks are said to be powers of two."""
    return POWERS_OF_2.items() <= coded.quantization.items()


def _block(name: str, coded: Coded, said: Said) -> tuple[int, int]:
    """The size that a weight's blocks had, if it is one that the method can say."""
    blocks = [sized(block, coded.weights[name]) for block in said.blocks]
    return coded.scales[name].block if coded.scales[name].block in blocks else blocks[0]


def _scale_spec(name: str, coded: Coded, said: Said) -> TensorSpec:
    weight, scales = coded.weights[name], coded.scales[name]
    stored = coded.stored.specs[scales.weight]
    block = _block(name, coded, said)
    return stored if block == scales.block else replace(stored, shape=grid_shape(weight.rows, weight.columns, block))


def _input_scales(names: Sequence[str], coded: Coded, states: Fp8States | None, job: Job) -> dict[str, float]:
    """The fixed scales that the inputs had, or where the module has recorded another amax since, that one's; of an
    expert, its own."""
    found = {given: coded.input_scale(name) for name in names if (given := coded.scales[name].input) is not None}
    carried = {name: value for name, value in found.items() if value is not None}
    state = states.modules.get(job.module) if states else None
    if state and job.expert is not None:
        state = state.of_expert(job.expert)
    if states is None or state is None or not carried or not state.roles["input"].recorded:
        return carried
    recorded = float(recorded_amax(state.roles["input"], "input", states.recipe))
    if math.isclose(recorded, float(amax_of(max(carried.values()))), rel_tol=_TWO_ROUNDINGS):
        return carried
    return dict.fromkeys(carried, recorded / FP8_MAX[CODES])


def amax_of(scale_inv: float) -> Tensor:
    """The amax that a fixed scale stands for, FP32 `[]`."""
    return torch.tensor(scale_inv) * FP8_MAX[CODES]


def _add_constants(jobs: list[Job], coded: Coded) -> None:
    """Scales of no weight, those of a KV cache, are written with the first that has one."""
    known = {name for scales in coded.scales.values() for name in scales.names}
    rest = {name: spec for name, spec in coded.stored.specs.items() if name not in known}
    for name, spec in rest.items():
        if spec.rows * spec.columns != 1:
            raise PrecisionError(f"`{name}` is {list(spec.shape)}: only one scale for a whole cache is carried back")
    values = {name: float(read_tensor(coded.stored, name).float().reshape(())) for name in rest}
    for number, job in enumerate(jobs):
        if job.encode and values:
            encode = replace(job.encode, input_scales={**job.encode.input_scales, **values})
            jobs[number] = replace(job, encode=encode)
            return


def seeded(reader: Reader, coded: Coded | None, plan: Plan) -> Fp8States | None:
    """FP8 state out of the fixed input scales of an FP8 directory: somebody has calibrated them, and an amax is an
    amax. None where there are none. Of a fused group the largest; experts have one each."""
    if coded is None or reader.layout != "hf" or not reader.encodings:
        return None
    given: dict[str, list[float]] = {}
    for job in plan.jobs:
        scales = [coded.input_scale(name) or 0.0 for name in job.reads if name in coded.scales]
        if job.row.gemm:
            given.setdefault(job.module, []).append(max(scales, default=0.0))
    recipe, modules = DelayedScaling(), {}
    for module, shape in plan.gemms.items():
        if any(given[module]):
            amaxes = torch.tensor(given[module]).reshape(shape) * FP8_MAX[CODES]
            fresh = Fp8State.fresh(recipe.amax_history_len, shape)
            modules[module] = Fp8State({**fresh.roles, "input": after_one_update(amaxes, "input", recipe)})
    method = coded.quantization.get("quant_method")
    return Fp8States(recipe, modules, producer=f"{FIXED_SCALES}{method}") if modules else None
