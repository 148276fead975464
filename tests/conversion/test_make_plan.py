"""What is planned for a source of names, shapes and dtypes alone: no file is needed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import pico
import pytest
import torch

from precisionctl.architectures.families import architecture_of, from_hf_config, table_of
from precisionctl.architectures.param_map import Naming, Row, names
from precisionctl.architectures.rearrangements import GAMMA
from precisionctl.architectures.wrapped_architecture import in_directory
from precisionctl.dtypes import DType
from precisionctl.export.gguf.gguf_plan import in_gguf
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import Layout, TensorSpec, kind_and_parameter, state_name
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.optimizer_jobs import optimizer_jobs
from precisionctl.planning.plan import Job


@dataclass(frozen=True)
class Source:
    """The part of a Reader that planning needs, of an optimizer too."""

    model: ModelShape
    specs: Mapping[str, TensorSpec]
    layout: Layout = "hf"
    optimizer_specs: Mapping[str, TensorSpec] = field(default_factory=dict)
    path: Path | None = None


def stored(model: ModelShape, layout: Layout, naming: Naming = "as stored", **dtypes: DType) -> dict[str, TensorSpec]:
    """The tensors of a model in BF16, or in the one of `dtypes` that is for the end of a name (`_` for `.`)."""
    found = {}
    for row in table_of(model).spelled({}, model, naming):
        usual = DType.int64 if row.integers_below else DType.bfloat16
        for place in row.places(model) if row.present.in_layout(layout, model) else ():
            for name, shape in zip(names(row, layout, place), row.shapes(model, layout), strict=True):
                found[name] = TensorSpec(shape, next((d for end, d in dtypes.items() if ends(name, end)), usual))
    return found


def ends(name: str, end: str) -> bool:
    return name.replace(".", "_").endswith(end)


HF_NORM, MEGATRON_NORM = "linear_attn_norm_weight", "self_attention_out_norm_weight"


@pytest.mark.parametrize("norm", [DType.float32, DType.bfloat16, DType.float16])
@pytest.mark.parametrize("beside", [DType.float32, DType.bfloat16, DType.float16])
def test_megatron_has_a_norm_less_one_in_fp32_whatever_is_beside_it_or_asked_for(norm: DType, beside: DType) -> None:
    model = pico.shape("qwen3-next")
    source = Source(model, stored(model, "hf", **{HF_NORM: norm, "A_log": beside}))
    for asked in (None, DType.bfloat16, DType.float32):
        assert dtypes_of(MEGATRON_NORM, source, "megatron", asked) == {DType.float32}


@pytest.mark.parametrize("norm", [DType.float32, DType.bfloat16])
def test_from_megatron_to_megatron_a_norm_less_one_is_not_rounded(norm: DType) -> None:
    model = pico.shape("qwen3-next")
    source = Source(model, stored(model, "megatron", **{MEGATRON_NORM: norm}), "megatron")
    assert dtypes_of(MEGATRON_NORM, source, "megatron", None) == {norm}
    assert dtypes_of(MEGATRON_NORM, source, "megatron", DType.bfloat16) == {norm}
    assert dtypes_of(MEGATRON_NORM, source, "megatron", DType.float32) == {DType.float32}


@pytest.mark.parametrize(
    ("norm", "a_log", "weights", "there"),
    [
        (DType.float32, DType.bfloat16, DType.bfloat16, DType.bfloat16),  # Qwen3-Next as published
        (DType.float32, DType.float32, DType.bfloat16, DType.float32),  # Qwen3.5 as published
        (DType.float32, DType.bfloat16, DType.float32, DType.float32),  # A_log keeps its dtype in a result of FP32
        (DType.float32, DType.float16, DType.float16, DType.float16),
        (DType.bfloat16, DType.bfloat16, DType.bfloat16, DType.float32),  # as Megatron trains it: 1 more needs FP32
        (DType.bfloat16, DType.float32, DType.bfloat16, DType.float32),
    ],
)
def test_hugging_face_has_the_norm_as_wide_as_what_is_beside_it(
    norm: DType, a_log: DType, weights: DType, there: DType
) -> None:
    model = pico.shape("qwen3-next")
    dtypes = {MEGATRON_NORM: norm, "A_log": a_log, "out_proj_weight": weights}
    source = Source(model, stored(model, "megatron", **dtypes), "megatron")
    assert dtypes_of(HF_NORM, source, "hf", None) == {there}
    assert dtypes_of(HF_NORM, source, "hf", DType.bfloat16) == {DType.bfloat16}


def dtypes_of(end: str, source: Source, target: Layout, asked: DType | None) -> set[DType]:
    """Those that are planned for tensors with this end of a name."""
    return {spec.dtype for name, spec in make_plan(source, target, dtype=asked).targets.items() if ends(name, end)}


@pytest.mark.parametrize("family", ["llama-3", "cohere2-moe"])
def test_within_hugging_face_each_tensor_keeps_its_own_dtype(family: str) -> None:
    """Also those that Megatron merges: gate and up, queries and keys."""
    model = pico.shape(family)
    specs = stored(model, "hf", gate_proj_weight=DType.float32, k_proj_weight=DType.float16)
    plan = make_plan(Source(model, specs), "hf")
    assert plan.targets == specs
    merged = make_plan(Source(model, specs), "megatron").targets
    assert {spec.dtype for name, spec in merged.items() if ends(name, "linear_qkv_weight")} == {DType.float32}


def test_masters_are_weights_where_they_are_asked_for_and_there() -> None:
    model = pico.shape("llama-3")
    specs = stored(model, "megatron")
    state = {state_name("param", name): TensorSpec(spec.shape, DType.float32) for name, spec in specs.items()}
    missing = state_name("param", "decoder.final_layernorm.weight")
    del state[missing]
    source = Source(model, specs, "megatron", state)
    for target in ("hf", "megatron"):
        plan = make_plan(source, target, dtype=DType.float32, masters=True)  # type: ignore[arg-type]
        read = {name for job in plan.jobs for name in job.reads}
        assert read == state.keys() | {"decoder.final_layernorm.weight"}
        assert not any(job.name.startswith("optimizer.") for job in plan.jobs)
    assert not any(name in state for job in make_plan(source, "hf", dtype=DType.float32).jobs for name in job.reads)


@pytest.mark.parametrize("norm", [DType.bfloat16, DType.float32])
@pytest.mark.parametrize("beside", [DType.bfloat16, DType.float32])
def test_masters_are_planned_where_16_bits_alone_have_one(norm: DType, beside: DType) -> None:
    """As Megatron's plain optimizer keeps them, where FP32 is its own master. All that trainers go on from is FP32."""
    model = pico.shape("qwen3-next")
    specs = stored(model, "megatron", **{MEGATRON_NORM: norm, "A_log": beside, "dt_bias": beside})
    state = {
        state_name(kind, name): TensorSpec(spec.shape, DType.float32)
        for name, spec in specs.items()
        for kind in ("param", "exp_avg", "exp_avg_sq")
        if kind != "param" or spec.dtype != DType.float32
    }
    plan = make_plan(Source(model, specs, "megatron", state), "hf", optimizer=True, naming="in memory")
    weights = {name for job in plan.jobs if not job.name.startswith("optimizer.") for name in job.writes}
    assert {plan.targets[name].dtype for name in weights} == {DType.float32}


TOWER = {"model.visual.merger.norm.bias": TensorSpec((8,), DType.bfloat16)}


def qwen3_vl_moe() -> ModelShape:
    """Whose experts have the same names as published, and in memory transposed."""
    text = pico.settings("qwen3-moe") | {"model_type": "qwen3_vl_moe_text", "num_experts": 4}
    config = {"model_type": "qwen3_vl_moe", "text_config": text}
    names = ["model.language_model.embed_tokens.weight", "lm_head.weight", *TOWER]
    return in_directory(architecture_of("qwen3_moe"), from_hf_config(config), config, names)


def test_a_nemotron_within_a_wrapper_is_in_gguf() -> None:
    """Its body is `backbone.` in published files of the text model alone, whose names GGUF's tables have."""
    model = from_hf_config({"model_type": "NemotronH_Nano_VL_V2", "llm_config": pico.settings("nemotron-h")})
    tower = {"vision_model.radio_model.x": TensorSpec((8,), DType.bfloat16)}
    plan = make_plan(Source(model, stored(model, "hf") | tower), "hf")
    assert {"token_embd.weight", "output_norm.weight"} <= in_gguf(plan, "bf16", ()).plan.targets.keys()


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "olmo-hybrid", "qwen3-moe", "deepseek-v4"])
def test_a_spelling_is_found_whichever_is_written(family: str) -> None:
    """Spellings that differ in shapes alone, in names alone, and in both."""
    model, tower = (qwen3_vl_moe(), TOWER) if family == "qwen3_vl_moe" else (pico.shape(family), {})
    if model.gdn:
        model = replace(model, gdn=replace(model.gdn, value_head_dim=2 * model.gdn.key_head_dim))
    namings: tuple[Naming, ...] = ("as stored", "in memory")
    spellings = {naming: stored(model, "hf", naming) | tower for naming in namings}
    assert len({tuple(each.items()) for each in spellings.values()}) == 2
    for here, specs in spellings.items():
        for there in namings:
            plan = make_plan(Source(model, specs), "hf", naming=there)
            written = spellings[here if there == "as stored" and family != "olmo-hybrid" else there]
            assert {name: spec.shape for name, spec in plan.targets.items()} == {
                name: spec.shape for name, spec in written.items()
            }


@pytest.mark.parametrize("stores_head", [True, False])
def test_a_copy_of_a_tied_output_layer_is_one_of_the_embedding(stores_head: bool) -> None:
    """In a layer of prediction, as DeepSeek's and GLM-4.5's have them."""
    model = replace(pico.shape("glm4-moe"), mtp_num_layers=1, tied_embeddings=True)
    embedding, copy = "model.embed_tokens.weight", f"model.layers.{model.num_layers}.shared_head.head.weight"
    specs = stored(model, "hf")
    specs |= dict.fromkeys([copy, *(["lm_head.weight"] if stores_head else [])], specs[embedding])
    (job,) = (job for job in make_plan(Source(model, specs), "megatron").jobs if embedding in job.reads)
    assert set(job.copies) == {copy, *(["lm_head.weight"] if stores_head else [])}
    assert copy in make_plan(Source(model, specs), "hf").targets


def test_moments_of_a_norm_with_two_names_are_not_shifted() -> None:
    """No built-in table has a norm that is less one and has two spellings."""
    model = replace(pico.shape("llama-3"), zero_centered_gamma=True)
    here = Row("model.norm.weight", "decoder.final_layernorm.weight", ("hidden_size",), GAMMA)
    row = replace(here, names="model.final.weight", as_stored=here)
    job = Job("decoder.final_layernorm.weight", row, here.hf, ("decoder.final_layernorm.weight",))
    specs = {here.hf[0]: TensorSpec((model.hidden_size,), DType.float32)}
    state = {state_name(kind, here.hf[0]): specs[here.hf[0]] for kind in ("exp_avg", "exp_avg_sq")}
    made = optimizer_jobs([job], Source(model, specs, optimizer_specs=state), "megatron", masters=True)
    zeros = torch.zeros(model.hidden_size)
    merged = {kind_and_parameter(each.name)[0]: each.row.source.merge([zeros], model) for each in made}
    assert {kind: float(whole[0]) for kind, whole in merged.items()} == {"param": -1, "exp_avg": 0, "exp_avg_sq": 0}


def test_a_megatron_checkpoint_has_no_spelling() -> None:
    for family in ("deepseek-v4", "hy-v3", "minimax-m3", "gpt-oss"):
        model = pico.shape(family)
        for naming in get_args(Naming):
            assert all(row.source is row for row in table_of(model).spelled({}, model, naming))
