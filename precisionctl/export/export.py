"""An export's plan: the weights of FP8 GEMMs become E4M3 codes, with the scales that training already knows."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from precisionctl.architectures.families import architecture_of
from precisionctl.engines.serving import in_step
from precisionctl.errors import PrecisionError
from precisionctl.export.input_scales import NO_STATE, input_scales
from precisionctl.export.refused_shapes import Refusal, refused_error, refused_shapes, served, without_refused
from precisionctl.fp8.numerics import Numbers, rounded_up
from precisionctl.fp8.state import Fp8States
from precisionctl.param import TensorSpec
from precisionctl.planning.encode import Encode
from precisionctl.planning.make_plan import Source, make_plan
from precisionctl.planning.plan import Job, Plan
from precisionctl.precision import Precision
from precisionctl.quant_methods.base import CODES, POWERS_OF_2, QuantMethod, Scales, Scheme, Spelling

_HEAD = "lm_head"


@dataclass(frozen=True)
class Export:
    """The plan of a directory of FP8 weights, and what the directory says of itself: `quantization`, the
    `quantization_config` of its config.json, and further `files` by name.

    `notes` are for the user; `kept` are the modules with a matrix that stays in BF16, by full name.
    """

    plan: Plan
    quantization: Mapping[str, Any]
    files: Mapping[str, bytes]
    notes: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def codes(self) -> list[str]:
        """The weights that are encoded."""
        return [name for job in self.plan.jobs if job.encode for name in job.encode.weight_scales]


@dataclass(frozen=True)
class Format:
    """How an export's weights are coded (`scheme`) and how that is spelled (`method`). `numbers`: what its scales are,
    but for those that are kept of a source of codes; powers of two are said to be such."""

    method: QuantMethod
    scheme: Scheme
    numbers: Numbers = "FP32"

    @property
    def spelling(self) -> Spelling:
        assert self.method.spelling is not None, "engines name methods that exports are written in"
        return self.method.spelling

    def scales(self, weight: str, spec: TensorSpec) -> Scales:
        """The scale tensors of a weight."""
        return self.method.scales(weight, spec, self.scheme)

    def quantization(self, ignored: Sequence[str]) -> dict[str, Any]:
        """The `quantization_config`, with the modules that are not quantized."""
        return {**self.spelling.config(self.scheme, ignored), **(POWERS_OF_2 if self.numbers == "powers of 2" else {})}


def plan_in_bf16(source: Source) -> Plan:
    """The plan of the directory that an export makes, before anything of it is encoded."""
    return make_plan(source, "hf", dtype=torch.bfloat16, respelled=True)


def fp8_jobs(plan: Plan, precision: Precision) -> list[Job]:
    """The jobs whose weights an export encodes. Not those of experts that a family stores as one tensor: no engine
    reads codes of that."""
    wanted = (job for job in plan.jobs if job.row.gemm and precision.in_fp8(job.module))
    return [job for job in wanted if not _is_slice(job.writes[0])]


def make_export(
    plan: Plan,
    states: Fp8States | None,
    form: Format,
    precision: Precision,
    refusal: Refusal | None = None,
    *,
    keep_refused: bool = False,
    why_no_state: str = NO_STATE,
) -> Export:
    """Turn a plan in BF16 into that of a directory with E4M3 weights.

    `precision` says which modules stay in BF16. Weights of shapes that the engine refuses are an error, or, with
    `keep_refused`, stay in BF16 too, with all that engines want in one form with them. The scheme `static` takes its
    input scales from `states`; `why_no_state` says why there are none, if there are none.

    Raises MissingFp8State where `static` needs an input amax that was never recorded, PrecisionError for shapes that
    are refused.
    """
    refusal = refusal or partial(served(plan).refusal, scheme=form.scheme, ragged="last")
    jobs = fp8_jobs(plan, precision)
    refused = refused_shapes(jobs, plan, refusal)
    if refused and not keep_refused:
        raise refused_error(refused, form.scheme)
    jobs = without_refused(jobs, refused)
    if form.scheme == "static":
        encodings = _with_one_scale(jobs, plan, form, input_scales(states, jobs, why_no_state))
    else:
        _check_rows_are_channels(jobs, plan)
        encodings = {job.name: _encode(job, plan, form) for job in jobs}
    codes = {name for encode in encodings.values() for name in encode.weight_scales}
    kept = _kept(plan, codes)
    quantization = form.quantization(kept)
    encoded = replace(
        plan,
        jobs=tuple(replace(job, encode=encodings.get(job.name)) for job in plan.jobs),
        targets=_targets(plan, codes, form),
        quantization=quantization,
    )
    notes = tuple(_notes(plan, precision, refused))
    return Export(encoded, quantization, form.spelling.files(quantization), notes, tuple(kept))


def _check_rows_are_channels(jobs: Sequence[Job], plan: Plan) -> None:
    """Raise PrecisionError for weights that a family stores transposed (GPT-2's Conv1D)."""
    for job in jobs:
        if not job.row.is_row_permutation(plan.model):
            raise PrecisionError(
                f"`{job.writes[0]}` is stored as [in, out]: its rows are not the channels that have scales",
                where=f"architecture {plan.model.architecture}",
                do="Export with --scheme static, which has one scale for all of a weight.",
            )


def _encode(job: Job, plan: Plan, form: Format) -> Encode:
    scales = {name: form.scales(name, plan.targets[name]) for name in job.writes}
    return Encode(
        blocks={name: tensors.block for name, tensors in scales.items()},
        weight_scales={name: tensors.weight for name, tensors in scales.items()},
        input_scales={},
        numbers=form.numbers,
    )


def _with_one_scale(jobs: Sequence[Job], plan: Plan, form: Format, inputs: Mapping[str, float]) -> dict[str, Encode]:
    """How each job encodes for `static`: what engines compute as one has one weight scale, and one input scale, which
    is the largest of `inputs`. A job is such a group, but for DeepSeek's latents, which are two."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.name if job.row.of_experts else in_step(job.writes[0]), []).append(job)
    encodings = {}
    for group in groups.values():
        largest = max(inputs[job.module] for job in group)
        input_scale = float(rounded_up(torch.tensor(largest), form.numbers))
        for job in group:
            scales = [form.scales(name, plan.targets[name]) for name in job.writes]
            encodings[job.name] = replace(
                _encode(job, plan, form),
                shared=True,
                alongside={other.writes[0]: other.reads[0] for other in group if other is not job},
                input_scales={tensors.input: input_scale for tensors in scales if tensors.input is not None},
            )
    return encodings


def _targets(plan: Plan, codes: Collection[str], form: Format) -> dict[str, TensorSpec]:
    """The directory's tensors, each weight's scales after it."""
    targets: dict[str, TensorSpec] = {}
    for name, spec in plan.targets.items():
        targets[name] = replace(spec, dtype=CODES) if name in codes else spec
        if name in codes:
            targets |= form.spelling.specs(form.scales(name, spec), spec, form.scheme)
    return targets


def _kept(plan: Plan, codes: Collection[str]) -> list[str]:
    """Modules with a matrix that is not encoded, among them those whose matrix is stored under another name (a tied
    `lm_head`): they are modules all the same to a loader."""
    matrices = [name for name, spec in plan.targets.items() if len(spec.shape) == 2 and name not in codes]
    aliases = architecture_of(plan.model.architecture).aliases
    tied = [alias.hf for alias in aliases if getattr(plan.model, alias.switch) and not alias.written]
    # transformers calls every head `lm_head`, whatever its tensor is called
    return list(dict.fromkeys([*(_module(name) for name in (*matrices, *tied)), _HEAD]))


def _module(name: str) -> str:
    return name.rpartition(".")[0] if _is_slice(name) else name.removesuffix(".weight")


def _is_slice(name: str) -> bool:
    """Whether a tensor is one expert's slice of a stored tensor of all of them, `….mlp.experts.down_proj[3]`."""
    return name.endswith("]")


def _notes(plan: Plan, precision: Precision, refused: Mapping[str, str]) -> Iterator[str]:
    if any(_is_slice(job.writes[0]) and precision.in_fp8(job.module) for job in plan.jobs if job.row.gemm):
        yield (
            f"Experts stay in BF16: {plan.model.architecture} stores those of a layer as one tensor, "
            "and no engine reads FP8 codes of that."
        )
    if refused:
        name, what = next(iter(refused.items()))
        yield (
            f"{len(refused)} weights stay in BF16 for their shapes, with what is computed with them; the first is "
            f"{name}: {what}."
        )
