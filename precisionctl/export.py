"""An export's plan: the weights of FP8 GEMMs become E4M3 codes, with the scales that training already knows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from precisionctl.architectures.find import architecture_of
from precisionctl.cast import Encode, filled, read_state
from precisionctl.errors import MissingFp8State, PrecisionError
from precisionctl.fp8.encoding import Encoding
from precisionctl.fp8.numerics import FP8_MAX, recorded_amax
from precisionctl.fp8.state import Fp8States
from precisionctl.param import TensorSpec
from precisionctl.plan import Job, Plan, Source, check_fp8_gemm, make_plan
from precisionctl.precision import Precision
from precisionctl.quant_methods.base import CODES, QuantMethod, Scheme


class StatefulSource(Source, Protocol):
    """A Source that knows its FP8 state, and which of its tensors are codes."""

    @property
    def fp8(self) -> Fp8States | None: ...
    @property
    def encodings(self) -> Mapping[str, Encoding]: ...


_HEAD = "lm_head"
_RECORD = (
    "Record it with `precisionctl calibrate` and give --fp8-state, train a few steps with `precisionctl resume "
    "--precision fp8`, or export with --scheme dynamic."
)


@dataclass(frozen=True)
class Export:
    """A plan, and what the directory says of itself: config.json's `quantization_config` and files beside it.
    `recorded_by` says where input scales are from."""

    plan: Plan
    quantization: Mapping[str, Any]
    files: Mapping[str, bytes]
    recorded_by: str = ""
    notes: tuple[str, ...] = ()

    @property
    def codes(self) -> list[str]:
        """The weights that are encoded."""
        return [name for job in self.plan.jobs if job.encode for name in job.encode.weight_scales]


def make_export(
    source: StatefulSource, method: QuantMethod, scheme: Scheme, precision: Precision, fp8_state: Path | None = None
) -> Export:
    """Plan a directory of E4M3 weights for inference; everything else in BF16.

    `precision` says which modules stay in BF16; experts that a family stores as one tensor do, too, for no engine reads
    such codes. One weight scale and one input scale for each fused group, and one input scale for all experts of a
    layer. Raises MissingFp8State where `static` asks for an input amax that was never recorded, and PrecisionError
    for shapes that FP8 GEMMs do not take and for weights that are codes already.
    """
    if source.encodings:
        raise PrecisionError(
            "the weights are FP8 codes; encoding them again would round them twice",
            do="Export the checkpoint that they were made from, or convert it with --precision bf16 first.",
        )
    plan = make_plan(source, "hf", dtype=torch.bfloat16, respelled=True)
    encoded = [job for job in plan.jobs if job.row.gemm and precision.in_fp8(job.module) and not _fused(job.writes[0])]
    for job in encoded:
        check_fp8_gemm(job, plan.model)
        if scheme == "dynamic" and not job.row.moves(plan.model):
            raise PrecisionError(
                f"`{job.writes[0]}` is stored as [in, out]: its rows are not the channels that have scales",
                where=f"architecture {plan.model.architecture}",
                do="Export with --scheme static, which has one scale for all of a weight.",
            )
    assert method.spelling is not None, "engines name methods that exports are written in"
    given = read_state(fp8_state, plan.gemms) if fp8_state else None
    states = filled(source.fp8, given, None)
    inputs = _input_scales(states, encoded) if scheme == "static" else {}
    encodings = {job.name: _encode(job, plan, method, scheme, inputs.get(job.module)) for job in encoded}
    jobs = tuple(replace(job, encode=encodings.get(job.name)) for job in plan.jobs)
    codes = {name for encode in encodings.values() for name in encode.weight_scales}
    targets: dict[str, TensorSpec] = {}
    for name, spec in plan.targets.items():
        targets[name] = replace(spec, dtype=CODES) if name in codes else spec
        if name in codes:
            targets |= method.spelling.specs(method.scales(name, spec, scheme), spec)
    matrices = [name for name, spec in plan.targets.items() if len(spec.shape) == 2 and name not in codes]
    ignored = list(dict.fromkeys(map(_module, (*matrices, *_shared(plan)))))
    if _HEAD not in ignored:  # what transformers calls every head, whatever its tensor is called
        ignored.append(_HEAD)
    quantization = method.spelling.config(scheme, ignored)
    return Export(
        replace(plan, jobs=jobs, targets=targets, quantization=quantization),
        quantization,
        method.spelling.files(scheme, ignored),
        _recorded_by(states),
        tuple(_notes(plan, precision)),
    )


def _recorded_by(states: Fp8States | None) -> str:
    """Who recorded a state, and when, in words."""
    if states is None:
        return ""
    return states.producer if states.iteration is None else f"{states.producer}, iteration {states.iteration}"


def _notes(plan: Plan, precision: Precision) -> Iterator[str]:
    if any(_fused(job.writes[0]) and precision.in_fp8(job.module) for job in plan.jobs if job.row.gemm):
        yield (
            f"Experts stay in BF16: {plan.model.architecture} stores those of a layer as one tensor, "
            "and no engine reads FP8 codes of that."
        )


def _fused(name: str) -> bool:
    """Whether a tensor is an expert's slice of a stored one, `….mlp.experts.down_proj[3]`."""
    return name.endswith("]")


def _module(name: str) -> str:
    return name.rpartition(".")[0] if _fused(name) else name.removesuffix(".weight")


def _shared(plan: Plan) -> list[str]:
    """Matrices that are stored under another name (a tied `lm_head`), but modules all the same to a loader."""
    aliases = architecture_of(plan.model.architecture).aliases
    return [alias.hf for alias in aliases if getattr(plan.model, alias.switch) and not alias.written]


def _input_scales(states: Fp8States | None, jobs: list[Job]) -> dict[str, float]:
    """scale_inv of each module's input: the largest amax of its history (of all its experts') over E4M3's largest."""
    if states is None:
        raise MissingFp8State(
            "the checkpoint holds no FP8 state, so no input scales are known",
            do=_RECORD,
        )
    scales = {}
    for job in jobs:
        state = states.modules.get(job.module)
        amax = recorded_amax(state.roles["input"], "input", states.recipe).amax() if state else torch.zeros(())
        if not amax > 0:
            raise MissingFp8State(
                f"the input of `{job.module}` was never recorded",
                do=_RECORD,
            )
        scales[job.module] = float(amax / FP8_MAX[CODES])
    return scales


def _encode(job: Job, plan: Plan, method: QuantMethod, scheme: Scheme, input_scale: float | None) -> Encode:
    scales = {name: method.scales(name, plan.targets[name], scheme) for name in job.writes}
    return Encode(
        blocks={name: tensors.block for name, tensors in scales.items()},
        weight_scales={name: tensors.weight for name, tensors in scales.items()},
        input_scales={t.input: input_scale for t in scales.values() if t.input is not None and input_scale is not None},
        shared=scheme == "static",
    )
