"""An export's plan: the weights of FP8 GEMMs become E4M3 codes, with the scales that training already knows."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from precisionctl.architectures.find import architecture_of
from precisionctl.engines.shapes import Served, in_step
from precisionctl.errors import MissingFp8State, PrecisionError
from precisionctl.fp8.numerics import FP8_MAX, recorded_amax
from precisionctl.fp8.state import Fp8States
from precisionctl.param import TensorSpec
from precisionctl.planning.encode import Encode
from precisionctl.planning.make_plan import Source, make_plan
from precisionctl.planning.plan import Job, Plan
from precisionctl.precision import Precision
from precisionctl.quant_methods.base import CODES, POWERS_OF_2, QuantMethod, Scheme

_HEAD = "lm_head"
_RECORD = (
    "Record it with `precisionctl calibrate` and give --fp8-state, train a few steps with `precisionctl resume "
    "--precision fp8`, or export with --scheme dynamic."
)


@dataclass(frozen=True)
class Export:
    """A plan, and what the directory says of itself: config.json's `quantization_config` and files beside it. `kept`
    are the modules with weights of two dimensions that stay in BF16."""

    plan: Plan
    quantization: Mapping[str, Any]
    files: Mapping[str, bytes]
    notes: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def codes(self) -> list[str]:
        """The weights that are encoded."""
        return [name for job in self.plan.jobs if job.encode for name in job.encode.weight_scales]


Refusal = Callable[[str, TensorSpec], str | None]
"""What an engine has against a weight of this name and shape as FP8; None for nothing."""


def plan_of_values(source: Source) -> Plan:
    """The plan of the directory that an export makes, before anything of it is encoded."""
    return make_plan(source, "hf", dtype=torch.bfloat16, respelled=True)


def in_fp8(plan: Plan, precision: Precision) -> list[Job]:
    """Jobs whose weights an export encodes; experts that a family stores as one tensor it does not, for no engine reads
    such codes."""
    wanted = (job for job in plan.jobs if job.row.gemm and precision.in_fp8(job.module))
    return [job for job in wanted if not _fused(job.writes[0])]


def make_export(
    plan: Plan,
    states: Fp8States | None,
    method: QuantMethod,
    scheme: Scheme,
    precision: Precision,
    refusal: Refusal | None = None,
    *,
    keep_refused: bool = False,
    powers_of_2: bool = False,
) -> Export:
    """Make a plan of values one of a directory of E4M3 weights for inference; everything else is in BF16.

    `precision` says which modules stay in BF16. What has a shape that the engine refuses does too if `keep_refused`,
    with all that engines want to have the same form. For `static`, one weight scale and one input scale for each fused
    group, and one input scale for all experts of a layer. `powers_of_2`: scales of blocks are such, and are said to be.
    Raises MissingFp8State where `static` asks for an input amax
    that was never recorded, and PrecisionError for shapes that are refused.
    """
    refusal = refusal or partial(served(plan).refusal, scheme=scheme, ragged="last")
    encoded = in_fp8(plan, precision)
    kept = _refused(plan, encoded, refusal)
    if kept and not keep_refused:
        raise _misfits(kept, scheme)
    alongside = {in_step(name) for name in kept}
    encoded = [job for job in encoded if not any(in_step(name) in alongside for name in job.writes)]
    for job in encoded:
        if scheme != "static" and not job.row.moves(plan.model):
            raise PrecisionError(
                f"`{job.writes[0]}` is stored as [in, out]: its rows are not the channels that have scales",
                where=f"architecture {plan.model.architecture}",
                do="Export with --scheme static, which has one scale for all of a weight.",
            )
    assert method.spelling is not None, "engines name methods that exports are written in"
    encodings = {job.name: _encode(job, plan, method, scheme, powers_of_2) for job in encoded}
    if scheme == "static":
        encodings = _with_one_scale(encodings, encoded, plan, method, input_scales(states, encoded))
    jobs = tuple(replace(job, encode=encodings.get(job.name)) for job in plan.jobs)
    codes = {name for encode in encodings.values() for name in encode.weight_scales}
    targets: dict[str, TensorSpec] = {}
    for name, spec in plan.targets.items():
        targets[name] = replace(spec, dtype=CODES) if name in codes else spec
        if name in codes:
            targets |= method.spelling.specs(method.scales(name, spec, scheme), spec, scheme)
    matrices = [name for name, spec in plan.targets.items() if len(spec.shape) == 2 and name not in codes]
    ignored = list(dict.fromkeys(map(_module, (*matrices, *_shared(plan)))))
    if _HEAD not in ignored:  # what transformers calls every head, whatever its tensor is called
        ignored.append(_HEAD)
    quantization = {**method.spelling.config(scheme, ignored), **(POWERS_OF_2 if powers_of_2 else {})}
    return Export(
        replace(plan, jobs=jobs, targets=targets, quantization=quantization),
        quantization,
        method.spelling.files(quantization),
        tuple(_notes(plan, precision, kept)),
        tuple(ignored),
    )


def served(plan: Plan, ranks: int = 1) -> Served:
    """A plan's model on so many GPUs."""
    return Served(plan.model.num_attention_heads, plan.model.num_query_groups, ranks)


def _refused(plan: Plan, jobs: list[Job], refusal: Refusal) -> dict[str, str]:
    """What is wrong with the shapes of weights, by name."""
    found = {name: refusal(name, plan.targets[name]) for job in jobs for name in job.writes}
    return {name: what for name, what in found.items() if what}


def _misfits(refused: Mapping[str, str], scheme: Scheme) -> PrecisionError:
    name, what = next(iter(refused.items()))
    others = "--scheme dynamic, whose channels have no blocks; or " if scheme == "block" else ""
    return PrecisionError(
        f"{len(refused)} weights have shapes that are refused, the first is `{name}`: {what}",
        do=f"Choose {others}--keep-misfits, which leaves them in BF16 with what is computed with them; or name modules "
        "in keep_bf16 of a --recipe.",
    )


def _notes(plan: Plan, precision: Precision, kept: Mapping[str, str]) -> Iterator[str]:
    if any(_fused(job.writes[0]) and precision.in_fp8(job.module) for job in plan.jobs if job.row.gemm):
        yield (
            f"Experts stay in BF16: {plan.model.architecture} stores those of a layer as one tensor, "
            "and no engine reads FP8 codes of that."
        )
    if kept:
        name, what = next(iter(kept.items()))
        yield (
            f"{len(kept)} weights stay in BF16 for their shapes, with what is computed with them; the first is {name}: "
            f"{what}."
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


def input_scales(states: Fp8States | None, jobs: list[Job]) -> dict[str, float]:
    """scale_inv of each module's input: the largest amax of its history (of all its experts') over E4M3's largest.
    Raises MissingFp8State where one was never recorded."""
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


def _encode(job: Job, plan: Plan, method: QuantMethod, scheme: Scheme, powers_of_2: bool) -> Encode:
    scales = {name: method.scales(name, plan.targets[name], scheme) for name in job.writes}
    return Encode(
        blocks={name: tensors.block for name, tensors in scales.items()},
        weight_scales={name: tensors.weight for name, tensors in scales.items()},
        input_scales={},
        power_of_2=powers_of_2,
    )


def _with_one_scale(
    encodings: Mapping[str, Encode], jobs: list[Job], plan: Plan, method: QuantMethod, inputs: Mapping[str, float]
) -> dict[str, Encode]:
    """For `static`: what engines compute as one has one weight scale, and one input scale, which is the largest. A job
    is such a group, but for DeepSeek's latents, which are two."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.name if job.row.of_experts else in_step(job.writes[0]), []).append(job)
    made = {}
    for group in groups.values():
        input_scale = max(inputs[job.module] for job in group)
        for job in group:
            scales = [method.scales(name, plan.targets[name], "static") for name in job.writes]
            made[job.name] = replace(
                encodings[job.name],
                shared=True,
                alongside={other.writes[0]: other.reads[0] for other in group if other is not job},
                input_scales={tensors.input: input_scale for tensors in scales if tensors.input is not None},
            )
    return made
