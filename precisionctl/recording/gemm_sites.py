"""Find where a live model computes the GEMMs that have FP8 state, by their Megatron names. In transformers' models the
families' tables say which modules those are; in Megatron-Core modules have the names."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from torch import Tensor, nn

from precisionctl.architectures.families import supported
from precisionctl.errors import PrecisionError, UnknownArchitecture
from precisionctl.fp8.state import core_attention_of
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import is_slice
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Job
from precisionctl.precision import Precision
from precisionctl.recording.live_weights import LiveWeights, in_transformers
from precisionctl.trainer.backends.base import Norm, norm_of

_LAYER = re.compile(r"(?:^|\.)decoder\.layers\.(\d+)$")
_EXPERT = re.compile(r"\.local_experts\.(\d+)")


@dataclass(frozen=True)
class Normed:
    """The norm before a GEMM. `module` is called with the norm's input; `output` computes in FP32 what TE's fused norm
    casts. `adds_to_rounded` says whether the module rounds a multiplier to BF16 and then adds a bias, as LayerNorm1P in
    transformers does (`weight + 1`). The bias may cancel everything except the rounding error."""

    module: nn.Module
    output: Callable[[Tensor], Tensor]
    adds_to_rounded: bool = False


@dataclass(frozen=True)
class GemmSite:
    """A GEMM and the modules that compute it: all of `linears` take its input, and their outputs together are its
    output (q, k and v). `expert` is the number of the expert that it belongs to. If one module computes the GEMMs of
    several experts, `experts` are their numbers; it is called with these experts' tokens, and with the number of tokens
    for each."""

    name: str
    linears: tuple[nn.Module, ...]
    normed: Normed | None = None
    expert: int | None = None
    experts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sites:
    """The GEMMs of a live model that are to be recorded, and its attention modules whose keys and values are recorded,
    with the name that their state gets. `in_transformers` says whether the model is transformers' or
    Megatron-Core's."""

    gemms: tuple[GemmSite, ...]
    attention: Mapping[nn.Module, str] = field(default_factory=dict)
    in_transformers: bool = False


def find_sites(model: nn.Module, precision: Precision) -> Sites:
    """The sites of a model of transformers or Megatron-Core whose GEMMs `precision` has in FP8. Raises
    UnknownArchitecture for a model of another kind or without a table, PrecisionError for GEMMs that no module computes
    alone."""
    if in_transformers(model):
        return _of_transformers(model, precision)
    if any(_LAYER.search(name) for name, _ in model.named_modules()):
        return _of_megatron(model, precision)
    raise UnknownArchitecture(
        f"`{type(model).__name__}` is a model of neither transformers nor Megatron-Core",
        do="Give the model itself: what an adapter or another wrapper makes of it has other names.",
    )


def _of_transformers(model: nn.Module, precision: Precision) -> Sites:
    plan = make_plan(LiveWeights.of(model), "megatron").text
    jobs, precision = {job.name: job for job in plan.jobs}, precision.of_layers(plan.model.num_layers)
    gemms, attention = [], {}
    for job in plan.jobs:
        if not job.row.gemm:
            continue
        names = [read.rpartition(".")[0] for read in job.reads]
        if (core := core_attention_of(job.module)) and not (plan.model.mla or plan.model.csa):
            attention[model.get_submodule(names[0].rpartition(".")[0])] = core
        if precision.in_fp8(job.module):
            if is_slice(job.reads[0]):
                raise _no_linears(names[0])
            linears = tuple(model.get_submodule(name) for name in names)
            gemms.append(GemmSite(job.module, linears, _norm_before(job.module, jobs, model, plan.model), job.expert))
    return Sites(tuple(gemms), attention, in_transformers=True)


def _norm_before(name: str, jobs: Mapping[str, Job], model: nn.Module, shape: ModelShape) -> Normed | None:
    """The norm in transformers that Megatron fuses into a module; None if there is none."""
    weight, bias = jobs.get(f"{name}.layer_norm_weight"), jobs.get(f"{name}.layer_norm_bias")
    if weight is None or not weight.reads:  # one without parameters (OLMo) is told by what it gives, rounded
        return None
    norm = norm_of(shape)

    def output(values: Tensor) -> Tensor:
        gain = weight.row.merge([model.get_parameter(weight.reads[0])], shape)
        added = model.get_parameter(bias.reads[0]) if bias and bias.reads else gain.new_zeros(len(gain))
        return norm.of(values, gain, added)

    module = model.get_submodule(weight.reads[0].rpartition(".")[0])
    return Normed(module, output, adds_to_rounded=norm.zero_centered and bias is not None)


def _no_linears(name: str) -> PrecisionError:
    return PrecisionError(
        "experts in one tensor have no linears to record",
        where=name,
        do='Leave them out (`precision.keep_bf16=["*.experts.*"]` as an override), or record them with `calibrate`.',
    )


def _of_megatron(model: nn.Module, precision: Precision) -> Sites:
    """Numbers of layers are those in the whole model, as `layer_number` of each says, from 1 on; those of experts are
    in `local_expert_indices`."""
    modules = dict(model.named_modules())
    layers = {name: int(found[1]) for name in modules if (found := _LAYER.search(name))}
    config = getattr(model, "config", None)
    precision = precision.of_layers(getattr(config, "num_layers", len(layers)))
    gemms, attention = [], {}
    for path, number in layers.items():
        prefix = f"decoder.layers.{getattr(modules[path], 'layer_number', number + 1) - 1}"
        of_experts = f"{prefix}.mlp.experts.linear_fc1"
        if hasattr(modules.get(f"{path}.mlp.experts"), "weight1") and precision.in_fp8(of_experts):  # GroupedMLP
            raise _no_linears(f"{prefix}.mlp.experts")
        kinds = ("linear_kv_up_proj", "linear_kv_proj")  # of latents, and of DeepSeek-V4's shared keys
        latent = any(f"{path}.self_attention.{kind}" in modules for kind in kinds)
        for inner, module in modules[path].named_modules():
            if inner == "self_attention.core_attention" and not latent:
                attention[module] = f"{prefix}.{inner}"
            found = _EXPERT.search(inner)
            name = _EXPERT.sub("", inner)
            if name not in _gemm_names() or not precision.in_fp8(f"{prefix}.{name}"):
                continue
            numbers = getattr(modules[path].get_submodule("mlp"), "local_expert_indices", None)
            weights = sum(bool(re.fullmatch(r"weight\d+", each)) for each, _ in module.named_parameters(recurse=False))
            experts = tuple(numbers or range(weights)) if weights else ()
            expert = (numbers[int(found[1])] if numbers else int(found[1])) if found else None
            gemms.append(GemmSite(f"{prefix}.{name}", (module,), _fused_norm(module), expert, experts))
    return Sites(tuple(gemms), attention)


@cache
def _gemm_names() -> frozenset[str]:
    """The names of modules of GEMMs, within their layer, in any family."""
    rows = (row for family in supported().values() for row in family.all_rows)
    modules = (row.megatron.rpartition(".")[0] for row in rows if row.gemm)
    return frozenset(module.partition("{layer}.")[2] for module in modules if "{layer}" in module)


def _fused_norm(module: nn.Module) -> Normed | None:
    """The norm in one of TE's linears."""
    if getattr(module, "layer_norm_weight", None) is None:
        return None
    norm = Norm(module.normalization, module.eps, module.zero_centered_gamma)  # type: ignore[arg-type]
    return Normed(module, lambda values: norm.of(values, module.layer_norm_weight, module.layer_norm_bias))  # type: ignore[arg-type]
