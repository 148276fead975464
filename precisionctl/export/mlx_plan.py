"""A plan of Hugging Face's tensors as one of what `mlx_lm.convert` saves: its names, stacks, dtypes and codes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from precisionctl.checkpoints.mlx.mlx_models import UNUSED_KEPT
from precisionctl.checkpoints.mlx.mlx_names import in_mlx_names, mlx_shape, within
from precisionctl.checkpoints.tensor_changes import (
    GATE_THEN_UP,
    GATE_UP_IN_TURNS,
    LATENT_KEYS_VALUES,
    PLUS_ONE,
    SAME,
    TensorChange,
)
from precisionctl.codes.mlx_groups import MXFP4, MlxGroups, mlx_groups
from precisionctl.dtypes import DType
from precisionctl.export.changed_parts import jobs_in_format
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import TensorSpec, shared_spec, stack_and_slice
from precisionctl.planning.plan import Job, Plan

MlxScheme = Literal["bf16", "f16", "4bit", "8bit", "mxfp4", "mxfp8", "nvfp4"]
"""What matrices are, as `--scheme` has it: values, or codes of one of MLX's modes, the integers in groups of 64. MXFP4
codes of the source (gpt-oss) are kept in all but the first two, and with `mxfp4` nothing else becomes codes then."""

_SETTINGS: Mapping[MlxScheme, tuple[str, int, int]] = {
    "4bit": ("affine", 4, 64),
    "8bit": ("affine", 8, 64),
    "mxfp4": ("mxfp4", 4, 32),
    "mxfp8": ("mxfp8", 8, 32),
    "nvfp4": ("nvfp4", 4, 16),
}
"""Mode, bits and group."""

_CHANGES: Mapping[tuple[str, ...], TensorChange] = {
    ("",): SAME,
    ("joined",): SAME,
    ("joined", "joined"): GATE_THEN_UP,
    ("alternating", "alternating"): GATE_UP_IN_TURNS,
    ("turned", "joined"): LATENT_KEYS_VALUES,
    ("plus_one",): PLUS_ONE,
}
"""What becomes of a published tensor, by how mlx-lm has its parts. llama.cpp has these changes too."""

_LIKE_DEEPSEEK = "deepseek(?:_v[23]2?)?|dots1|exaone_moe|glm4_moe|glm4_moe_lite|glm_moe_dsa|kimi_k2|solar_open"
_VALUES = re.compile(rf"(?:{_LIKE_DEEPSEEK}) .+\.mlp\.gate|nemotron_h .+\.mixer\.gate|\w+ .+\.(?:[qkv]_)?conv(?:1d)?")
_EIGHT_BITS = re.compile(
    r"(?:kimi_linear|qwen3_moe|qwen3_next|qwen3_5_moe_text|mellum) .+\.mlp\.gate|gemma4_text .+\.router\.proj|"
    r"bailing_moe .+\.mlp\.gate\.gate_proj|"
    r"(?:qwen3_next|qwen3_5_moe_text) .+\.shared_expert_gate|gpt_oss .+\.router|"
    r"granitemoe\w* .+\.router\.layer|granite(?:moe)? (?:.+\.self_attn\.o_proj|.+mlp\.down_proj|lm_head)|"
    r"afmoe .+\.router\.gate|jamba .+\.router|laguna .+\.gate\.proj|lfm2_moe .+\.feed_forward\.gate|"
    r"minimax_m(?:2|3_vl_text) .+\.block_sparse_moe\.gate|step3p5 .+\.mlp\.gate\.gate"
)
"""Modules that mlx-lm does not quantize, and those that it quantizes to 8-bit integers in groups of 64 whatever is
asked for, by family and name (models/*.py: what is no Linear, Embedding, SwitchLinear or MultiLinear;
quant_predicate)."""

_KEPT_DTYPE = re.compile(
    r"\w+ .+\.(?:e_score_correction_bias|expert_bias|router_bias)|qwen3_5\w* .+\.A_log|"
    r"kimi_linear .+\.(?:A_log|dt_bias)"
)
"""Tensors whose dtype is not changed (models/*.py, cast_predicate)."""


_AS_CODES: Mapping[str, Sequence[str]] = {
    "gemma4_text": ("experts.0.up_proj.weight",),
    "gpt_oss": ("mlp.experts.gate_up_proj_blocks[0]", "mlp.experts.down_proj_blocks[0]"),
    "llama4_text": ("feed_forward.experts.0.up_proj.weight",),
    "minimax_m3_vl_text": (
        *("self_attn.index_q_proj.weight", "mlp.up_proj.weight", "block_sparse_moe.experts.0.w1.weight"),
    ),
    "mistral4": ("mlp.experts.0.up_proj.weight",),
    "step3p5": ("moe.experts.0.up_proj.weight",),
}
"""Names in a layer by which `make_plan` sees that weights are to have those that they have as codes, by family."""


def names_as_codes(model: ModelShape) -> set[str]:
    """The weights that are to have the names that they have as codes: gpt-oss's experts are `[in, out]` as values and
    `[out, in]` as codes, in MLX and torchtitan; others' are one tensor as values, and a matrix each as codes."""
    names = {
        f"model.layers.{at}.{name}" for at in range(model.num_layers) for name in _AS_CODES.get(model.architecture, ())
    }
    return {model.wrapper.name_of(name) for name in names} if model.wrapper else names


def mlx_has(job: Job, model: ModelShape) -> bool:
    """Whether mlx-lm has what a job of a text model writes: no class of it has layers of multi-token prediction, and
    few keep tensors that no token is computed with."""
    return not (job.row.of_prediction or (job.row.unused and model.architecture not in UNUSED_KEPT))


def in_mlx(plan: Plan, scheme: MlxScheme, dtype: DType, codes: Collection[str]) -> Plan:
    """What `mlx_lm.convert` makes of a plan of values in Hugging Face's layout, with values in `dtype`. Copies of tied
    tensors, a wrapper's towers and what `mlx_has` not are not written. `codes` are tensors of its source that are
    MXFP4."""
    model, plan, kept = plan.model, plan.text_alone, set() if scheme in ("bf16", "f16") else set(codes)
    before = within(model)
    setting = None if scheme == "mxfp4" and kept else _SETTINGS.get(scheme)
    usual = mlx_groups(*setting, dtype) if setting else None
    targets = dict[str, TensorSpec]()

    def made_of(job: Job, name: str) -> tuple[TensorChange, Sequence[str]]:
        keeps = bool(job.reads) and kept.issuperset(job.reads) and job.row.moves_rows(model)
        tensors = in_mlx_names(name, model.architecture, dense=model.moe is None)
        change, writes = _CHANGES[tuple(tensor.how for tensor in tensors)], list[str]()
        shapes = change.part_shapes(plan.targets[name].shape, model)
        for tensor, shape in zip(tensors, shapes, strict=True):
            made = f"{before}{tensor.name}" if tensor.place is None else f"{before}{tensor.name}[{tensor.place}]"
            spec = shared_spec(mlx_shape(tensor.name, shape), plan.targets[name].dtype)
            if keeps:
                targets[made] = replace(spec, dtype=DType.uint8, packing=MXFP4)
            else:
                targets[made] = _stored(tensor.name, spec, usual, model.architecture, dtype)
            writes.append(made)
        return change, writes

    jobs = tuple(jobs_in_format((job for job in plan.jobs if mlx_has(job, model)), made_of))
    quantization = _quantization(targets, MXFP4 if kept else usual, model.architecture)
    return replace(plan, jobs=jobs, targets=targets, quantization=quantization)


def _stored(name: str, spec: TensorSpec, usual: MlxGroups | None, family: str, dtype: DType) -> TensorSpec:
    """How a tensor of MLX's name, of a stack one of its matrices, is stored that has this `spec` as values: as codes
    where mlx-lm quantizes its module, in the `usual` form or in eight bits, else in `dtype`."""
    named, columns = f"{family} {name.removesuffix('.weight')}", spec.shape[-1] if spec.shape else 1
    is_matrix = name.endswith(".weight") and len(spec.shape) > 1
    if usual is not None and is_matrix and columns % usual.group == 0 and not _VALUES.fullmatch(named):
        packing = mlx_groups(*_SETTINGS["8bit"], dtype) if _EIGHT_BITS.fullmatch(named) else usual
        if columns % packing.group == 0:
            return shared_spec(spec.shape, DType.uint8, packing=packing)
    changes = spec.dtype.is_floating_point and not _KEPT_DTYPE.fullmatch(f"{family} {name}")
    return shared_spec(spec.shape, dtype) if changes else spec


def _quantization(targets: Mapping[str, TensorSpec], usual: MlxGroups | None, family: str) -> dict[str, Any]:
    """`quantization` of config.json: what most modules have, and what others do, by their names."""
    if usual is None:
        return {}
    packings = {stack_and_slice(name)[0]: spec.packing for name, spec in targets.items()}
    others = dict[str, Any]()
    for name, packing in packings.items():
        module = name.removesuffix(".weight")
        if isinstance(packing, MlxGroups) and _EIGHT_BITS.fullmatch(f"{family} {module}"):
            others[module] = {"group_size": packing.group, "bits": packing.bits}  # as their predicates say it
        elif isinstance(packing, MlxGroups) and _said(packing) != _said(usual):
            others[module] = _said(packing)
    return _said(usual) | others


def _said(packing: MlxGroups) -> dict[str, Any]:
    return {"group_size": packing.group, "bits": packing.bits, "mode": packing.mode}
