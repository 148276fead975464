"""The way back to FP8: a checkpoint whose weights were codes once becomes the directory of codes that it was."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from precisionctl.checkpoints.base import Reader, read_tensor
from precisionctl.checkpoints.encodings_file import WeightEncodings
from precisionctl.engines.base import engines
from precisionctl.errors import MissingFp8State, PrecisionError
from precisionctl.export.export import Export
from precisionctl.export.input_scales import amax_of
from precisionctl.export.model_card import Card, beside
from precisionctl.export.weight_encodings import check_model
from precisionctl.fp8.encoding import grid_shape
from precisionctl.fp8.numerics import FP8_MAX, recorded_amax
from precisionctl.fp8.state import Fp8States
from precisionctl.param import TensorSpec
from precisionctl.planning.encode import Encode
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Job
from precisionctl.quant_methods.base import CODES, POWERS_OF_2, Quantization, recognise, sized

_TWO_ROUNDINGS = 2.0**-22
"""How far an amax may be off, relatively, after it has been a scale and has become an amax again. A history of one row,
Megatron's default, keeps an amax in its scale alone."""


def make_reencoding(
    source: Reader, encodings: WeightEncodings, states: Fp8States | None, *, fixed_hold: bool
) -> Export:
    """Plan the directory of codes that a checkpoint was once, with the values that it has now.

    Weights that have not changed get the codes that they had. Blocks that have changed get new scales, in blocks of the
    old size. Input scales are those of amaxes that `states` has recorded, else the old ones, while they are of the
    weights still (`fixed_hold`). What was no code is in BF16.

    Raises MappingError where `encodings` are of another model, MissingFp8State for scales of inputs, and PrecisionError
    for those of a KV cache, that belong to weights which have changed.
    """
    plan = make_plan(source, "hf", dtype=torch.bfloat16, respelled=True)
    method = recognise({"quantization_config": encodings.quantization})
    assert method is not None, "codes of a Hugging Face directory have a method"
    said = method.read(encodings.quantization)
    check_model(encodings, plan)
    jobs = [replace(job, encode=_encode(job, encodings, said, states, fixed_hold)) for job in plan.jobs]
    _add_constants(jobs, encodings, fixed_hold)
    targets: dict[str, TensorSpec] = {}
    for name, spec in plan.targets.items():
        targets[name] = replace(spec, dtype=encodings.weights[name].dtype) if name in encodings.weights else spec
        if name in encodings.weights:
            targets[encodings.scales[name].weight] = _scale_spec(name, encodings, said)
    for job in jobs:
        targets |= {name: encodings.stored.specs[name] for name in (job.encode.input_scales if job.encode else ())}
    made = replace(plan, jobs=tuple(jobs), targets=targets, quantization=encodings.quantization)
    return Export(made, encodings.quantization, encodings.files)


def reencoding_card(made: Export, encodings: WeightEncodings, name: str) -> Card:
    """What the model card says of codes that are what they were, for whichever engine reads them."""
    method = recognise({"quantization_config": made.quantization})
    assert method is not None, "codes of a Hugging Face directory have a method"
    scheme = method.read(made.quantization).scheme
    serving = [engine for engine in engines().values() if (method.name, scheme) in engine.reads]
    dtypes = sorted({str(spec.dtype).removeprefix("torch.") for spec in encodings.weights.values()})
    fixed = any(scales.input is not None for scales in encodings.scales.values())
    facts = {
        "weights": ", ".join(dtypes),
        "format": method.name,
        "scheme": scheme,
        "codes and scales": "those that the weights had before; where values have changed since, made anew",
        "input scales": "as they were, or of what was recorded since" if fixed else "made by the engine",
    }
    matrices = [name for name, spec in made.plan.targets.items() if len(spec.shape) == 2 and name.endswith(".weight")]
    kept = [name.removesuffix(".weight") for name in matrices if name not in encodings.weights]
    title = " or ".join(engine.title for engine in serving) or f"readers of {method.name}"
    command = "\n".join(engine.serve(beside(name), 1) for engine in serving) or f"precisionctl inspect {beside(name)}"
    return Card(name, title, method.name, command, facts, list(encodings.weights), kept)


def _encode(
    job: Job, encodings: WeightEncodings, said: Quantization, states: Fp8States | None, fixed_hold: bool
) -> Encode | None:
    names = [name for name in job.writes if name in encodings.weights]
    if not names:
        return None
    return Encode(
        blocks={name: _block(name, encodings, said) for name in names},
        weight_scales={name: encodings.scales[name].weight for name in names},
        input_scales=_input_scales(names, encodings, states, job, fixed_hold),
        numbers="powers of 2" if in_powers_of_2(encodings) else "FP32",
    )


def in_powers_of_2(encodings: WeightEncodings) -> bool:
    """Whether all scales of blocks are said to be powers of two."""
    return POWERS_OF_2.items() <= encodings.quantization.items()


def _block(name: str, encodings: WeightEncodings, said: Quantization) -> tuple[int, int]:
    """The size that a weight's blocks had, if the method can say that size, else the first that it can."""
    blocks = [sized(block, encodings.weights[name]) for block in said.blocks]
    return encodings.scales[name].block if encodings.scales[name].block in blocks else blocks[0]


def _scale_spec(name: str, encodings: WeightEncodings, said: Quantization) -> TensorSpec:
    weight, scales = encodings.weights[name], encodings.scales[name]
    stored = encodings.stored.specs[scales.weight]
    block = _block(name, encodings, said)
    return stored if block == scales.block else replace(stored, shape=grid_shape(weight.rows, weight.columns, block))


def _input_scales(
    names: Sequence[str], encodings: WeightEncodings, states: Fp8States | None, job: Job, fixed_hold: bool
) -> dict[str, float]:
    """The fixed scales that the inputs had; where the module (or the expert) has recorded another amax since, the scale
    of that one."""
    found = {
        given: encodings.input_scale(name) for name in names if (given := encodings.scales[name].input) is not None
    }
    carried = {name: value for name, value in found.items() if value is not None}
    state = states.modules.get(job.module) if states else None
    if state and job.expert is not None:
        state = state.of_expert(job.expert)
    if states and state and carried and state.roles["input"].recorded:
        recorded = float(recorded_amax(state.roles["input"], "input", states.recipe))
        same = fixed_hold and math.isclose(recorded, float(amax_of(max(carried.values()))), rel_tol=_TWO_ROUNDINGS)
        return carried if same else dict.fromkeys(carried, recorded / FP8_MAX[CODES])
    if carried and not fixed_hold:
        raise MissingFp8State(
            f"the weights have changed since the fixed input scales of their codes were made, e.g. of `{names[0]}`",
            do="Record others with `precisionctl calibrate` and give --fp8-state, or use `export-inference --scheme "
            "dynamic`.",
        )
    return carried


def _add_constants(jobs: list[Job], encodings: WeightEncodings, fixed_hold: bool) -> None:
    """Have the scales that belong to no weight, those of a KV cache, written by the first job that encodes."""
    known = {name for scales in encodings.scales.values() for name in scales.names}
    rest = {name: spec for name, spec in encodings.stored.specs.items() if name not in known}
    if rest and not fixed_hold:
        raise PrecisionError(
            f"the weights have changed since the scales of their KV cache were made, e.g. `{next(iter(rest))}`",
            do="Record others with `precisionctl calibrate`, and use `export-inference --kv-cache fp8 --fp8-state`.",
        )
    for name, spec in rest.items():
        if spec.rows * spec.columns != 1:
            raise PrecisionError(f"`{name}` is {list(spec.shape)}: only one scale for a whole cache is carried back")
    values = {name: float(read_tensor(encodings.stored, name).float().reshape(())) for name in rest}
    for number, job in enumerate(jobs):
        if job.encode and values:
            encode = replace(job.encode, input_scales={**job.encode.input_scales, **values})
            jobs[number] = replace(job, encode=encode)
            return
