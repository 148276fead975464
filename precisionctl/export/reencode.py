"""The way back to FP8: a checkpoint whose weights were codes once becomes the directory of codes that it was."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from precisionctl.checkpoints.base import Reader, read_tensor
from precisionctl.checkpoints.encodings_file import WeightEncodings
from precisionctl.errors import PrecisionError
from precisionctl.export.export import Export
from precisionctl.export.input_scales import amax_of
from precisionctl.export.weight_encodings import check_model
from precisionctl.fp8.encoding import grid_shape
from precisionctl.fp8.numerics import FP8_MAX, recorded_amax
from precisionctl.fp8.state import Fp8States
from precisionctl.param import TensorSpec
from precisionctl.planning.encode import Encode
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Job
from precisionctl.quant_methods.base import CODES, POWERS_OF_2, Said, recognise, sized

_TWO_ROUNDINGS = 2.0**-22
"""What an amax may be off by that a scale was made of, and which was taken from that scale again: a history of one row,
Megatron's default, keeps it so."""


def make_reencoding(source: Reader, coded: WeightEncodings, states: Fp8States | None) -> Export:
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


def _encode(job: Job, coded: WeightEncodings, said: Said, states: Fp8States | None) -> Encode | None:
    names = [name for name in job.writes if name in coded.weights]
    if not names:
        return None
    return Encode(
        blocks={name: _block(name, coded, said) for name in names},
        weight_scales={name: coded.scales[name].weight for name in names},
        input_scales=_input_scales(names, coded, states, job),
        power_of_2=in_powers_of_2(coded),
    )


def in_powers_of_2(coded: WeightEncodings) -> bool:
    """Whether all scales of blocks are said to be powers of two."""
    return POWERS_OF_2.items() <= coded.quantization.items()


def _block(name: str, coded: WeightEncodings, said: Said) -> tuple[int, int]:
    """The size that a weight's blocks had, if it is one that the method can say."""
    blocks = [sized(block, coded.weights[name]) for block in said.blocks]
    return coded.scales[name].block if coded.scales[name].block in blocks else blocks[0]


def _scale_spec(name: str, coded: WeightEncodings, said: Said) -> TensorSpec:
    weight, scales = coded.weights[name], coded.scales[name]
    stored = coded.stored.specs[scales.weight]
    block = _block(name, coded, said)
    return stored if block == scales.block else replace(stored, shape=grid_shape(weight.rows, weight.columns, block))


def _input_scales(names: Sequence[str], coded: WeightEncodings, states: Fp8States | None, job: Job) -> dict[str, float]:
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


def _add_constants(jobs: list[Job], coded: WeightEncodings) -> None:
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
