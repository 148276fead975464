"""encode: a pass over a plan by which weights become codes, under a policy that says which and how.

A plan without such a pass writes values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from precisionctl.architectures.families import table_of
from precisionctl.codes.numerics import ScaleRounding, rounded_up
from precisionctl.engines.serving import fused, precision_group
from precisionctl.errors import PrecisionError
from precisionctl.export.input_scales import input_amaxes
from precisionctl.fp8.delayed_scaling import recorded_amax
from precisionctl.fp8.state import Fp8States
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.param import TensorSpec, is_slice
from precisionctl.planning.plan import Job, JobCodes, Plan, ScaleGroup
from precisionctl.precision import Precision
from precisionctl.quant_methods.base import FOUR_BITS, POWERS_OF_2, SCHEMES, TENSOR, QuantMethod, Scheme, Spelling
from precisionctl.quant_methods.scales import Scales
from precisionctl.sizes import counted
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

_HEAD = "lm_head"


class Policy(Protocol):
    """Which weights of a plan become codes, and how."""

    def codes(self, plan: Plan) -> Mapping[str, JobCodes]:
        """For each job that writes codes, by its name, which they are; other jobs write values."""
        ...

    def tensors(self, weight: str, spec: TensorSpec, scales: Scales) -> Mapping[str, TensorSpec]:
        """The specs of a weight's codes and of these scales in the result."""
        ...

    def further(self, codes: Iterable[JobCodes]) -> Mapping[str, TensorSpec]:
        """Tensors that follow all weights."""
        ...

    def quantization(self, kept: Sequence[str]) -> Mapping[str, Any]:
        """The `quantization_config`, given the modules that are not quantized."""
        ...

    def files(self, quantization: Mapping[str, Any]) -> Mapping[str, bytes]:
        """Further files that say the same, by name."""
        ...


def encode(plan: Plan, policy: Policy) -> Plan:
    """The plan of the same model with weights as codes. Nothing is read but what a policy knows already.

    Raises MissingFp8State for input scales, and PrecisionError for weights, that the policy cannot make; PrecisionError
    too for scales under the name of one of the model's tensors.
    """
    of_jobs = policy.codes(plan)
    scales = {name: each for codes in of_jobs.values() for name, each in codes.weights.items()}
    new = {name for codes in of_jobs.values() for name in codes.scale_tensors}
    if taken := min(new & plan.targets.keys(), default=None):
        raise PrecisionError(
            f"a scale would be called `{taken}`, and the model has another tensor of that name",
            do="Name the module in --exclude: it stays in BF16.",
        )
    targets: dict[str, TensorSpec] = {}
    for name, spec in plan.targets.items():
        targets |= policy.tensors(name, spec, scales[name]) if name in scales else {name: spec}
    targets |= policy.further(of_jobs.values())
    coded = scales.keys()
    quantization = policy.quantization(with_names_in_memory(modules_in_bf16(plan, coded), plan, coded))
    jobs = tuple(replace(job, codes=of_jobs.get(job.name)) for job in plan.jobs)
    return replace(plan, jobs=jobs, targets=targets, quantization=quantization, files=policy.files(quantization))


def modules_in_bf16(plan: Plan, codes: Set[str]) -> list[str]:
    """The modules of a plan of values that have a matrix which is not among the `codes`. A module whose matrix is
    stored under another name (a tied `lm_head`) is among them, since loaders have it too."""
    matrices = [name for name, spec in plan.targets.items() if len(spec.shape) == 2 and name not in codes]
    aliases = table_of(plan.model).aliases
    tied = [alias.hf for alias in aliases if plan.model.has(alias.switch) and not alias.written]
    modules = [name.rpartition(".")[0] if is_slice(name) else name.removesuffix(".weight") for name in matrices + tied]
    if not any(name.endswith(f"{_HEAD}.weight") for name in codes):
        modules.append(_HEAD)  # as transformers calls every head, whatever its tensor is called
    return list(dict.fromkeys(modules))


def with_names_in_memory(modules: Sequence[str], plan: Plan, codes: Set[str]) -> list[str]:
    """The names of modules that stay values, both in a directory and in the memory of transformers' classes. It renames
    tensors when it loads them, but not the names in such a list (transformers#48349; vLLM renames both). With both
    names a directory for any engine also loads by hand, where a family's table or the rule for wrappers knows them, if
    transformers reads weights in this form at all (`verify --target transformers`). Looking up all of its 800
    renamings, as exports to it do (`engines/rules/names_in_memory.py`), would take two seconds of imports.
    """
    named = {
        name.removesuffix(".weight"): called.removesuffix(".weight")
        for name, called in table_of(plan.model).in_memory(plan.targets, plan.model).items()
        if called.endswith(".weight") and called not in codes
    }
    found = dict.fromkeys((*modules, *(named[name] for name in modules if name in named)))
    if any(part in _WRAPPED for name in modules for part in name.split(".")):
        for name in modules:
            inner = name.removeprefix("language_model.").removeprefix("model.")
            found |= dict.fromkeys((f"model.language_model.{inner}", f"model.{name.removeprefix('model.')}", inner))
    if isinstance(plan.model, UntabledModel) and plan.model.within:
        found |= dict.fromkeys(f"{plan.model.within}{name}" for name in modules if name != _HEAD)
    return list(found)


_WRAPPED = ("language_model", "visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector")
"""Words in the names of wrappers, whose towers have no table and whose text model may stand in another place."""


def fp8_jobs(plan: Plan, precision: Precision, included: Set[str] = frozenset()) -> list[Job]:
    """The jobs whose weights become codes. Left out are experts that a family stores as one tensor, since no engine
    reads codes of such a tensor, and weights that engines want in the same form as one that stays in BF16. Groups of
    weights (`precision_group`) that are `included` become codes whatever the precision."""
    jobs = [job for job in plan.jobs if job.row.may_be_codes and job.weights and not is_slice(job.writes[0])]
    kept = {precision_group(name) for job in jobs if not precision.in_fp8(job.module) for name in job.weights}
    kept -= included
    return [job for job in jobs if kept.isdisjoint(map(precision_group, job.weights))]


@dataclass(frozen=True)
class WeightFormat:
    """How weights are stored as codes: the `scheme` (element and grid of scales), the `scale_rounding` of new
    scales, and the `method` that spells them."""

    method: QuantMethod
    scheme: Scheme
    scale_rounding: ScaleRounding = "FP32"

    @property
    def spelling(self) -> Spelling:
        assert self.method.spelling is not None, "engines name methods that exports are written in"
        return self.method.spelling

    def scales(self, jobs: Iterable[Job], plan: Plan) -> dict[str, Scales]:
        """The scale tensors of each weight of these jobs."""
        weights = (name for job in jobs for name in job.weights)
        return {name: self.method.scales(name, plan.targets[name], self.scheme) for name in weights}


Refusal = Callable[[str, TensorSpec, Scales], str | None]
"""A function from a weight's name, spec and scales to why an engine does not take it as codes; None if it does."""

KeptList = Callable[[Sequence[str], Sequence[str]], Sequence[str]]
"""A function of the modules that stay values, and of those that become codes: it returns the former, under the names
that the engine looks for."""


@dataclass(frozen=True)
class InScheme:
    """The policy of a scheme that engines know: the weights of these `jobs` become codes with these `scales`, in the
    scheme's grid.

    `inputs` is the amax of each module's input, FP32 `[]`, where the scheme fixes its scale (`static`, `nvfp4`).
    `refused` are weights that stay values because an engine refuses their shapes, or those of weights that it joins
    with them, and why. `kept` makes an engine's list of what is not quantized.
    """

    format: WeightFormat
    jobs: Sequence[Job]
    scales: Mapping[str, Scales]
    refused: Mapping[str, str]
    inputs: Mapping[str, Tensor] | None = None
    kept: KeptList | None = None

    def codes(self, plan: Plan) -> Mapping[str, JobCodes]:
        shared, rounding = SCHEMES[self.format.scheme].shared, self.format.scale_rounding
        input_rounding = "FP32" if self.format.scheme in FOUR_BITS else rounding  # engines do not round global scales
        of_jobs: dict[str, JobCodes] = {}
        # What engines compute as one has one (global) weight scale, and one input scale, the largest of its inputs'.
        for jobs in with_one_input(self.jobs) if shared else [[job] for job in self.jobs]:
            together = {name: self.scales[name] for job in jobs for name in job.weights}
            group = ScaleGroup(together, tuple(jobs), always=True) if shared else None
            input_scales: dict[str, float] = {}
            if self.inputs is not None:
                amax = torch.stack([self.inputs[job.module] for job in jobs if job.module in self.inputs]).amax()
                for scales in together.values():
                    if scales.input:
                        input_scales[scales.input] = float(rounded_up(scales.of_input_amax(amax), input_rounding))
            for job in jobs:
                own = {name: self.scales[name] for name in job.weights}
                known = {each.input: input_scales[each.input] for each in own.values() if each.input in input_scales}
                of_jobs[job.name] = JobCodes(own, known, group, rounding)
        return of_jobs

    def tensors(self, weight: str, spec: TensorSpec, scales: Scales) -> Mapping[str, TensorSpec]:
        spelling, scheme = self.format.spelling, self.format.scheme
        return {weight: spelling.codes(spec, scheme), **spelling.specs(scales, spec, spelling.form(scheme))}

    def further(self, codes: Iterable[JobCodes]) -> Mapping[str, TensorSpec]:
        return {}

    def quantization(self, kept: Sequence[str]) -> Mapping[str, Any]:
        coded = [name.removesuffix(".weight") for job in self.jobs for name in job.weights]
        kept = self.kept(kept, coded) if self.kept else kept
        powers = POWERS_OF_2 if self.format.scale_rounding == "powers of 2" else {}
        if self.format.spelling.ignored_by_part:
            # A router `mlp.gate` would take `mlp.gate_proj` along (verl#7519); a glob matches whole names
            codes = "\n".join(coded)
            kept = [f"{name[:-1]}[{name[-1]}]" if name in codes else name for name in kept]
        return {**self.format.spelling.config(self.format.scheme, kept), **powers}

    def files(self, quantization: Mapping[str, Any]) -> Mapping[str, bytes]:
        return self.format.spelling.files(quantization)


def in_scheme(
    plan: Plan,
    jobs: Sequence[Job],
    states: Fp8States | None,
    form: WeightFormat,
    refusal: Refusal,
    *,
    why_no_state: str,
    advice: Callable[[Sequence[Job]], str],
    keep_refused: bool,
    kept: KeptList | None,
) -> InScheme:
    """The policy that encodes the weights of these `jobs`, of a plan of BF16 values, in a format.

    A weight with a `refusal` is an error. `advice` makes its advice from the jobs that are left: without refused
    weights, and without those that engines want in the same form as them. With `keep_refused` all these stay in BF16
    instead. `kept` makes the list of what is not quantized. The scheme `static` takes its input scales from `states`;
    if there are none, `why_no_state` says why.

    Raises MissingFp8State if `static` needs an input amax that was never recorded, and PrecisionError for shapes that
    are refused and for weights that a family stores transposed (GPT-2's Conv1D).
    """
    scales = form.scales(jobs, plan)
    jobs, refused, misfits = without_refused(plan, jobs, scales, refusal)
    if refused and not keep_refused:
        name, why = next(iter(refused.items()))
        weights = counted(len(refused), "weight has a shape", "weights have shapes")
        which = f"the first is `{name}`" if len(refused) > 1 else f"`{name}`"
        raise PrecisionError(f"{weights} that the engine refuses, {which}: {why}", do=advice(jobs))
    if not jobs:
        raise PrecisionError(
            f"no weight is left that could be {SCHEMES[form.scheme].codes}"
            + (f": the engine takes none of {len(misfits)} for their shapes" if misfits else ""),
            do=advice(jobs)
            if misfits
            else "--include takes more of them, but none that --exclude names. Of a model without a table of its "
            "family, `precisionctl inspect` says of each linear why it stays in BF16.",
        )
    inputs = None
    if SCHEMES[form.scheme].fixed_inputs:
        inputs = input_amaxes(states, jobs, why_no_state, tabled=not isinstance(plan.model, UntabledModel))
    for job in jobs:
        if SCHEMES[form.scheme].block != TENSOR and not job.row.moves_rows(plan.model):
            raise PrecisionError(
                f"`{job.writes[0]}` is stored as [in, out]: its rows are not the channels that have scales",
                where=f"architecture {plan.model.architecture}",
                do="`export-inference --scheme static` has one scale for all of a weight.",
            )
    return InScheme(form, jobs, scales, misfits, inputs, kept)


def without_refused(
    plan: Plan, jobs: Iterable[Job], scales: Mapping[str, Scales], refusal: Refusal
) -> tuple[list[Job], Mapping[str, str], Mapping[str, str]]:
    """The jobs without those of refused weights, and of weights that engines want in the same form; the refused weights
    and why; and these with the others."""
    refused = {name: why for name, each in scales.items() if (why := refusal(name, plan.targets[name], each))}
    misfits = refused | along_with(refused, scales)
    return [job for job in jobs if misfits.keys().isdisjoint(job.weights)], refused, misfits


def along_with(refused: Mapping[str, str], weights: Iterable[str]) -> dict[str, str]:
    """The weights that stay values because engines want them in the same form as a refused one, and the reason in
    words."""
    first: dict[str, str] = {}
    for name in refused:
        first.setdefault(precision_group(name), name)
    groups = ((name, first.get(precision_group(name))) for name in weights if name not in refused)
    return {name: f"computed with `{other}`" for name, other in groups if other}


def with_one_input(jobs: Sequence[Job]) -> list[list[Job]]:
    """Group jobs whose weights engines compute as one, and which so have one input. In a family's table each job is a
    group, except DeepSeek's two latents. In a table that is read off a directory, a job is one weight of a group."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(fused(job.writes[0]), []).append(job)
    return list(groups.values())


def with_joint_amax(jobs: Sequence[Job], states: Fp8States) -> Iterator[tuple[list[Job], Tensor]]:
    """The groups of `with_one_input`, but with all experts of a layer in one, since engines give them one input scale.
    Yields each with the largest recorded amax of its inputs, FP32 `[]`, which is 0 where none was recorded. Groups
    without state are left out."""
    groups: dict[tuple[str, ...], list[Job]] = {}
    for group in with_one_input(jobs):
        groups.setdefault(tuple(job.module for job in group), []).extend(group)
    for modules, group in groups.items():
        inputs = [states.modules[module].roles["input"] for module in modules if module in states.modules]
        if inputs:
            yield group, torch.stack([recorded_amax(each, "input", states.recipe).amax() for each in inputs]).amax()
