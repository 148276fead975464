"""Muse: config.json key by key against transformers' class, what is refused, the names of tensors, and divisions."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pico
import pytest
import tiny_wrappers
import torch
from conversions import assert_there_and_back, carry_out, run
from gpt_models import assert_computes_as_transformers, assert_texts_are_apart
from safetensors.torch import load_file, save_file
from soaking import in_soak
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText

from precisionctl.architectures.families import architecture_of, from_hf_config, to_hf_config
from precisionctl.architectures.megatron.megatron_args import otherwise_in_megatron
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.request import Request
from precisionctl.dtypes import DType
from precisionctl.engines.base import engine_named
from precisionctl.errors import DamagedCheckpoint, PrecisionError, RecipeError, UnknownArchitecture
from precisionctl.param import Parallelism
from precisionctl.recipe import ParallelSettings
from precisionctl.trainer.parallel.shards import check as check_shards
from precisionctl.verify.engine_rules import check

pytestmark = pytest.mark.skipif(
    bool({"muse-glimmer", "muse-spark"} & pico.ABSENT.keys()), reason="this transformers has no Muse"
)

PLAIN = {"rope_type": "default", "rope_theta": 500.0}


@pytest.mark.soak
@pytest.mark.parametrize(
    "said",
    [
        {"layer_types": None, "layer_rope_theta": None, "num_hidden_layers": 6},
        {"layer_types": ["full_attention", *["sliding_attention"] * 3], "layer_rope_theta": None},
        {"layer_rope_theta": [0, 500.0, 500.0, 0.0], "rope_parameters": PLAIN},
        {"layer_types": ["full_attention"] * 4, "layer_rope_theta": [0] * 4},
        {"qk_scale_factor": 1.2345678901234567, "post_norm_eps": 0.1},
        {"rms_norm_eps": 0.1, "final_logit_softcapping": 0.5, "output_multiplier": 3.0},
        {"rope_parameters": pico.LLAMA3_ROPE, "layer_rope_theta": None},
    ],
    ids=str,
)
def test_a_setting_of_glimmer_means_what_it_means_to_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config("muse-glimmer", **said), tmp_path)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DamagedCheckpoint, {"sliding_window": None}),
        (DamagedCheckpoint, {"layer_rope_theta": [1e4]}),
        (DamagedCheckpoint, {"layer_rope_theta": [1e4, 1e4, 1e4, None]}),
        (DamagedCheckpoint, {"layer_rope_theta": 7}),
        (DamagedCheckpoint, {"qk_scale_factor": 0}),
        (DamagedCheckpoint, {"post_norm_eps": "none"}),
        (UnknownArchitecture, {"layer_rope_theta": [1e4, 1e4, 1e4, 0]}),  # which transformers would not heed
        (UnknownArchitecture, {"layer_types": ["conv"] * 4}),
        (UnknownArchitecture, {"hidden_activation": "gelu"}),
        (UnknownArchitecture, {"attention_bias": True}),
    ],
    ids=str,
)
def test_what_is_not_known_of_glimmer_is_refused_by_its_name(error: type[Exception], said: dict[str, Any]) -> None:
    with pytest.raises(error, match=next(iter(said))):
        from_hf_config(pico.config("muse-glimmer", **said))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DamagedCheckpoint, {"mlp_layer_types": ["sparse"]}),
        (DamagedCheckpoint, {"residual_gate_temperature": 0}),
        (DamagedCheckpoint, {"moe_hidden_size": 0}),
        (DamagedCheckpoint, {"output_multiplier": "one"}),
        (UnknownArchitecture, {"mlp_layer_types": ["thin"] * 4}),
        (UnknownArchitecture, {"hidden_act": "gelu"}),
    ],
    ids=str,
)
def test_what_is_not_known_of_spark_is_refused_by_its_name(error: type[Exception], said: dict[str, Any]) -> None:
    with pytest.raises(error, match=next(iter(said))):
        from_hf_config(pico.config("muse-spark", **said))


@pytest.mark.soak
@pytest.mark.parametrize(
    "said",
    [
        {"mlp_layer_types": None, "residual_gate_temperature": 1.0},
        {"mlp_layer_types": ["dense"] * 4, "rope_parameters": None, "layer_rope_theta": None},
        {"routed_scaling_factor": 2.5, "post_norm_eps": 0.1, "rms_norm_eps": 0.01},
        {"output_multiplier": 0.7, "num_experts_per_tok": 8, "moe_hidden_size": 16},
    ],
    ids=str,
)
def test_a_setting_of_spark_means_what_it_means_to_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config("muse-spark", **said), tmp_path)


@pytest.mark.skipif("muse_spark_text" not in CONFIG_MAPPING, reason="of transformers 5.24")
@pytest.mark.parametrize("kind", ["muse_glimmer_text", "muse_spark_text"])
def test_the_base_of_rotary_embeddings_is_read_and_written_where_the_class_heeds_it(kind: str) -> None:
    """Spark's does not heed one outside of `rope_parameters`."""
    settings = pico.settings(kind.removesuffix("_text").replace("_", "-"))
    said = {key: value for key, value in settings.items() if key not in ("rope_parameters", "layer_rope_theta")}
    theirs = AutoConfig.for_model(**said | {"rope_theta": 500.0}).rope_parameters["rope_theta"]
    model = from_hf_config(said | {"rope_theta": 500.0})
    assert model.rotary_base == theirs
    written = AutoConfig.for_model(**to_hf_config(dataclasses.replace(model, rotary_base=700.0), DType.bfloat16))
    assert written.rope_parameters["rope_theta"] == 700


@pytest.mark.parametrize("factor", [3.87, 5.4730064863875, 2.0, 1 / 3])
def test_the_factor_of_queries_is_written_as_it_was_read(factor: float) -> None:
    model = from_hf_config(pico.config("muse-glimmer", qk_scale_factor=factor))
    assert to_hf_config(model, "bfloat16")["qk_scale_factor"] == factor


@pytest.mark.soak
@pytest.mark.parametrize("family", ["muse-glimmer", "muse-spark"])
def test_texts_that_share_a_row_do_not_see_each_other(family: str, tmp_path: Path) -> None:
    assert_texts_are_apart(family, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("container", ["torch_dist", "torch"])
@pytest.mark.parametrize("family", ["muse-glimmer", "muse-spark"])
def test_a_checkpoint_comes_back_from_any_division(family: str, container: str, tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16)
    expert = 2 if family == "muse-spark" else 1
    assert_there_and_back(tmp_path / "hf", container=container, parallelism=Parallelism(2, 2, expert=expert))


def test_gates_routers_and_their_biases_keep_their_dtype(tmp_path: Path) -> None:
    """transformers has them in FP32."""
    pico.save(tmp_path / "hf", "muse-spark")
    run(tmp_path / "hf", tmp_path / "m", "megatron", precision="bf16")
    run(tmp_path / "m", tmp_path / "back", "hf")
    back = load_file(tmp_path / "back/model.safetensors")
    gates = {f"model.layers.{layer}.post_{of}_residual_gate.gate" for layer in range(4) for of in OF_BLOCKS}
    routers = {
        f"model.layers.{layer}.mlp.gate.{of}" for layer in (1, 2, 3) for of in ("weight", "e_score_correction_bias")
    }
    assert {name for name, tensor in back.items() if tensor.dtype == torch.float32} == gates | routers


OF_BLOCKS = ("attention", "feedforward")


def test_a_norm_of_experts_is_not_computed_of_parts_of_them() -> None:
    with pytest.raises(RecipeError, match="a norm of what each expert gives"):
        check_shards(pico.shape("muse-spark"), ParallelSettings(tensor=2))


def test_norms_store_the_same_number_in_both_layouts(tmp_path: Path) -> None:
    """Those in layers their factor less one, and the last one its factor."""
    pico.save(tmp_path / "hf", "muse-glimmer", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    theirs, ours = load_file(tmp_path / "hf/model.safetensors"), open_checkpoint(tmp_path / "m")
    for hf, megatron in {
        "model.norm": "decoder.final_layernorm",
        "model.layers.1.post_attention_layernorm": "decoder.layers.1.self_attention.linear_proj.post_layernorm",
    }.items():
        assert torch.equal(read_tensor(ours, f"{megatron}.weight"), theirs[f"{hf}.weight"])


def test_what_megatron_has_no_arguments_for_is_named() -> None:
    assert {*otherwise_in_megatron(pico.shape("muse-glimmer"))} == {
        *("post_layernorms", "post_norm_epsilon", "final_gamma_whole", "embedding_norm", "query_pre_attn_scalar"),
        *("logit_multiplier", "final_logit_softcapping"),
    }


WHOLE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
LINEARS = {f"{each}_proj" for each in ("q", "k", "v", "gate", "o", "up", "down")}


TAKEN = [*(("muse_glimmer", target) for target in ("vllm", "sglang", "transformers")), ("muse_spark", "transformers")]


@pytest.mark.parametrize(("kind", "target"), [TAKEN[0], TAKEN[-1], *in_soak(*TAKEN[1:-1])])
def test_an_export_of_the_wrapper_is_what_the_engine_takes(kind: str, target: str, tmp_path: Path) -> None:
    """Without codes of Spark's experts and of the projections around them."""
    all_experts = {"num_experts_per_tok": 8} if kind == "muse_spark" else {}  # none is chosen by a hair's breadth
    theirs = tiny_wrappers.save(tmp_path / "hf", kind, dtype=torch.bfloat16, **WHOLE, **all_experts)
    carry_out(Request.export(tmp_path / "hf", tmp_path / "out", target, "dynamic"))
    made, engine = open_checkpoint(tmp_path / "out"), engine_named(target)
    assert [each for each in check(made, engine) if each.rule.fatal] == []
    assert engine.lacks(json.loads((tmp_path / "out/config.json").read_text())) == []
    stored = load_file(tmp_path / "out/model.safetensors")
    coded = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    assert {name.split(".")[-2] for name in coded} == LINEARS
    assert not [name for name in coded if "expert" in name or "tower" in name]
    if target == "transformers":
        loaded, found_keys = AutoModelForImageTextToText.from_pretrained(
            tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
        )
        assert not found_keys["missing_keys"] and not found_keys["unexpected_keys"]
        tokens = torch.arange(24).view(2, 12) * 3 % 70
        with torch.no_grad():
            expected, found = theirs(tokens).logits.float(), loaded(tokens).logits.float()
        assert (expected - found).norm() < 0.3 * expected.norm()


@pytest.mark.parametrize("target", ["vllm", "sglang"])
def test_engines_that_load_no_codes_of_spark_but_modelopts_get_none(target: str, tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "muse_spark", dtype=torch.bfloat16, **WHOLE)
    with pytest.raises(PrecisionError, match="computes no codes of a muse_spark: of this model it loads values"):
        carry_out(Request.export(tmp_path / "hf", tmp_path / "out", target, "dynamic"))
    carry_out(Request.export(tmp_path / "hf", tmp_path / "fp8", "transformers", "dynamic"))
    found = check(open_checkpoint(tmp_path / "fp8"), engine_named(target))
    assert "codes in a muse_spark" in [each.what for each in found if each.rule.fatal]


def test_sglang_lacks_words_of_glimmer_that_its_config_asks_for(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "muse_glimmer", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert engine_named("sglang").lacks(config) == []
    del config["text_config"]["layer_rope_theta"]
    assert engine_named("sglang").lacks(config) == ["layer_rope_theta"]


def test_codes_of_a_stack_of_experts_are_refused_by_its_name(tmp_path: Path) -> None:
    """As the NVFP4 release of Spark has them."""
    pico.save(tmp_path, "muse-spark", dtype=torch.bfloat16)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    stack = "model.layers.1.mlp.experts.down_proj"
    tensors |= {
        stack: torch.zeros(8, 48, 16, dtype=torch.uint8),
        f"{stack}_weight_scale": torch.ones(8, 48, 2).to(torch.float8_e4m3fn),
        f"{stack}_weight_scale_2": torch.ones(8),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PrecisionError, match=f"{stack}_weight_scale is of codes of all experts of a layer in one"):
        run(tmp_path, tmp_path / "out", "hf", precision="bf16")


def test_spark_has_the_parameters_that_its_name_says() -> None:
    """Muse-Spark-Open-816B-A42B, of the sizes of transformers' class: without embeddings."""
    model = from_hf_config(AutoConfig.for_model("muse_spark_text").to_dict())
    rows = [row for row in architecture_of(model.architecture).spelled({}, model) if row.present.in_layout("hf", model)]
    sizes = {row.megatron: math.prod(row.shape(model)) * row.count(model) for row in rows}
    without = sum(sizes.values()) - sizes["embedding.word_embeddings.weight"] - sizes["output_layer.weight"]
    assert without // 10**9 == 816
    of_experts = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
    assert (without - of_experts * 248 // 256) // 10**9 == 42  # 8 of 256 for a token
