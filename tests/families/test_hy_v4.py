"""Hunyuan 4: its config.json key by key against transformers' class, whose rotary pairs the tests mend (`pico.py`), its
tensors by published names and others, and its prediction layer, which has one residual stream."""

import ast
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
import transformers
from conversions import assert_same_tensors, assert_there_and_back, run
from gpt_models import (
    as_gpt,
    assert_computes_as_transformers,
    assert_texts_are_apart,
    both_gradients,
    clear_tokens,
    converted,
)
from installed import need_loader
from safetensors.torch import load_file, save_file
from soaking import in_soak
from transformers import AutoModelForCausalLM
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite

from precisionctl.architectures.families import from_hf_config, to_hf_config
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.engines.base import engine_named
from precisionctl.errors import DamagedCheckpoint, PrecisionError, UnknownArchitecture
from precisionctl.param import Parallelism
from precisionctl.precision import PRESETS
from precisionctl.trainer.model.gpt import GPT
from precisionctl.verify.engine_rules import check

pytestmark = pytest.mark.skipif("hy4" in pico.ABSENT, reason="this transformers has no Hunyuan 4")


@pytest.mark.parametrize(
    "said",
    [
        {"mlp_layer_types": None},
        {"mlp_layer_types": ["sparse", "dense", "sparse"]},
        {"indexer_types": None, "layer_types": None},
        *in_soak(
            {"layer_types": ["deepseek_sparse_attention"] * 3},
            {"hc_mult": 3, "hc_magnitude": 0.7},
            {"hc_mult": 1, "hc_eps": 0.05},
            {"swiglu_limit": 0.05, "n_shared_experts": 2},
            {"n_group": 4, "topk_group": 2},
            {"routed_scaling_factor": 1.0, "index_n_heads": 1, "index_head_dim": 8},
            {"v_head_dim": 16, "head_dim": 5, "rms_norm_eps": 1e-6},
            {"rope_parameters": pico.YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.7}},
            {"tie_word_embeddings": True},
        ),
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_to_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config("hy4", **said), tmp_path)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UnknownArchitecture, {"enable_ihc": False}),
        (UnknownArchitecture, {"gated_mla": False}),
        (UnknownArchitecture, {"gating_type": "headwise"}),
        (UnknownArchitecture, {"learnable_sink": False}),
        (UnknownArchitecture, {"norm_topk_prob": False}),
        (UnknownArchitecture, {"layer_types": ["full_attention"] * 3}),
        (UnknownArchitecture, {"indexer_types": ["full", "none", "full"]}),
        (DamagedCheckpoint, {"indexer_types": ["full"] * 2}),
        (DamagedCheckpoint, {"hc_mult": 0}),
        (DamagedCheckpoint, {"hc_magnitude": -1.0}),
        (DamagedCheckpoint, {"swiglu_limit": 0}),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused_by_its_key(error: type[Exception], said: dict[str, Any]) -> None:
    with pytest.raises(error, match=next(iter(said))):
        from_hf_config(pico.config("hy4", **said))


@pytest.mark.parametrize("number", [1, 2, 6, 10])
def test_without_a_list_layers_have_the_indexers_that_transformers_takes(number: int) -> None:
    said = {"num_hidden_layers": number, "mlp_layer_types": None, "layer_types": None, "indexer_types": None}
    told = pico.config("hy4", **said)
    model = from_hf_config(told)
    kinds = type(pico.make("hy4").config).from_dict(told).indexer_types
    assert model.dsa and model.dsa.layers == tuple(kind == "full" for kind in kinds)


def test_transformers_takes_halves_of_channels_where_published_weights_have_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own function computes our logits of weights whose pairs are put so, and others of the published ones."""
    theirs = pico.make("hy4", initializer_range=0.12)
    ours = as_gpt(converted(theirs, tmp_path))
    tokens, turned = clear_tokens(ours, (2, 40)), theirs.config.qk_rope_head_dim
    monkeypatch.setattr(pico.modeling_hy_v4, "apply_rotary_pos_emb", modeling_glm4_moe_lite.apply_rotary_pos_emb)
    with torch.no_grad():
        expected = ours(tokens)[..., : pico.SIZES["vocab_size"]]
        assert (theirs(tokens).logits - expected).abs().max() > 1e-2
        for layer in theirs.model.layers:
            queries = layer.self_attn.q_b_proj.weight.unflatten(0, (4, -1))[:, -turned:]
            for rows in (*queries, layer.self_attn.kv_a_proj_with_mqa.weight[-turned:]):
                rows.copy_(torch.cat([rows[::2], rows[1::2]]))
        torch.testing.assert_close(theirs(tokens).logits, expected, rtol=0, atol=1e-5 * float(expected.std()))


@pytest.mark.soak
def test_gradients_are_transformers(tmp_path: Path) -> None:
    theirs = pico.make("hy4", initializer_range=0.12)
    ours = as_gpt(converted(theirs, tmp_path))
    tokens = clear_tokens(ours, (3, 100))
    for logits in (theirs(tokens).logits, ours(tokens)[..., : pico.SIZES["vocab_size"]]):
        logits.logsumexp(-1).sum().backward()
    for name, found, expected in both_gradients(theirs, ours):
        # A norm undoes by how much streams are read together, so that most of what reads them cancels, and in layer 0,
        # where they are copies, all of `alpha_pre` but rounding. The largest gradient of a hyper-connection is 0.5.
        atol = 1e-5 * max(float(expected.abs().max()), 1e-1 if ".alpha_" in name or ".hc_head_" in name else 0)
        torch.testing.assert_close(found, expected, rtol=0, atol=atol, msg=lambda said, name=name: f"{name}: {said}")


def test_texts_that_share_a_row_do_not_see_each_other(tmp_path: Path) -> None:
    assert_texts_are_apart("hy4", tmp_path)


def test_names_that_transformers_saves_and_has_in_memory_are_read_and_published_ones_written(tmp_path: Path) -> None:
    """With sinks and streams in FP32, as they are released."""
    model = pico.make("hy4", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    saved = load_file(file)
    assert {"model.layers.0.hc_pre.hc_attn_layer.hc_fn", "model.layers.0.mlp.linear_gate.weight"} < saved.keys()
    wide = [name for name in saved if ".hc_" in name or name.endswith("sink_param")]
    assert len(wide) == 3 * (2 * 3 + 1) + 3
    saved |= {name: saved[name].float() * 1.001 for name in wide}
    save_file(saved, file, {"format": "pt"})
    published = {pico.PUBLISHED["hy_v4"](name): tensor for name, tensor in saved.items()}
    names = {"self_attn.learnable_sink_param", "self_attn.linear_gate.weight", "mlp.gate_proj.weight"}
    names |= {f"hc_{block}_layer.hc_pre.hc_{part}" for block in ("attn", "mlp") for part in ("fn", "base", "scale")}
    assert {f"model.layers.0.{name}" for name in names} < published.keys() > {"model.hc_head.hc_head_fn"}
    run(tmp_path / "saved", tmp_path / "m", "megatron", precision="bf16")
    run(tmp_path / "m", tmp_path / "back", "hf")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == published.keys()
    assert [each for each in back if back[each].dtype != published[each].dtype] == []
    assert [each for each in back if not torch.equal(back[each], published[each])] == []
    run(tmp_path / "back", tmp_path / "m2", "megatron")
    assert_same_tensors(tmp_path / "m", tmp_path / "m2")
    run(tmp_path / "back", tmp_path / "dcp", "hf", container="dcp")
    assert {name for name in open_checkpoint(tmp_path / "dcp").specs if "[" not in name} <= model.state_dict().keys()
    run(tmp_path / "dcp", tmp_path / "m3", "megatron")
    assert_same_tensors(tmp_path / "m", tmp_path / "m3")
    theirs = type(model).from_pretrained(tmp_path / "back", dtype=torch.float32)
    expected = type(model).from_pretrained(tmp_path / "saved", dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in theirs.state_dict().items())


def test_an_indexers_channels_with_positions_are_megatrons_first(tmp_path: Path) -> None:
    """As SGLang moves them for DeepSeek's indexer (models/hunyuan_v4.py, permute_hyv4_indexer_weight)."""
    made = converted(pico.make("hy4"), tmp_path).tensors
    stored = load_file(tmp_path / "model.safetensors")
    core, theirs = "decoder.layers.0.self_attention.core_attention.indexer", "model.layers.0.self_attn.indexer"
    for ours, name, heads in (
        ("linear_wq_b.weight", "wq_b.weight", 2),
        ("linear_wk.weight", "wk.weight", 1),
        ("k_norm.bias", "k_norm.bias", 1),
    ):
        plain, turned = stored[f"{theirs}.{name}"].unflatten(0, (heads, 16)).split([8, 8], 1)
        assert torch.equal(made[f"{core}.{ours}"], torch.cat([turned, plain], 1).flatten(0, 1))


PREDICTION = (
    *("enorm", "hnorm", "eh_proj", "final_layernorm", "input_layernorm", "post_attention_layernorm"),
    *("self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa"),
    *("self_attn.kv_a_layernorm", "self_attn.kv_b_proj", "self_attn.o_proj", "self_attn.linear_gate"),
    *("self_attn.indexer.wq_b", "self_attn.indexer.wk", "self_attn.indexer.weights_proj", "self_attn.indexer.k_norm"),
    *("mlp.gate", "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
)


def with_prediction_layer(directory: Path) -> None:
    """The 27 tensors that the published model has of its own, all BF16: no hyper-connection is among them."""
    pico.save(directory, "hy4", dtype=torch.bfloat16)
    file = directory / "model.safetensors"
    tensors, config = load_file(file), json.loads((directory / "config.json").read_text())
    like = {name.removeprefix("model.layers.2."): tensor for name, tensor in tensors.items()}
    named = [f"{name}.weight" for name in PREDICTION] + ["self_attn.indexer.k_norm.bias"]
    named += ["self_attn.learnable_sink_param", "mlp.gate.e_score_correction_bias"]
    named += ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert len(named) == 27
    for name in named:
        norm = like["input_layernorm.weight"]
        shape = (64, 128) if name == "eh_proj.weight" else like.get(name, norm).shape
        tensors[f"model.mtp_layers.0.{name}"] = torch.randn(shape, dtype=torch.bfloat16)
    save_file(tensors, file, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


# prediction layers of the other container: test_hybrid_prediction.py
@pytest.mark.parametrize("container", ["torch_dist", *in_soak("torch")])
def test_a_prediction_layer_has_one_stream_and_comes_back_from_any_division(tmp_path: Path, container: str) -> None:
    with_prediction_layer(tmp_path / "hf")
    assert_there_and_back(tmp_path / "hf", container=container, parallelism=Parallelism(2, 3, expert=2))
    made = open_checkpoint(tmp_path / "megatron")
    layer = {name for name in made.specs if name.startswith("mtp.")}
    assert not [name for name in layer if "hyper_connection" in name or "hc_head" in name]
    ours = GPT(made.model, PRESETS["bf16"], device="meta")
    assert {name for name, _ in ours.named_parameters() if name.startswith("mtp.")} == layer


@pytest.mark.parametrize("target", ["vllm", *in_soak("sglang")])
def test_an_export_says_what_engines_look_for_and_leaves_gates_sinks_and_streams(tmp_path: Path, target: str) -> None:
    pico.save(tmp_path / "hf", "hy4", dtype=torch.bfloat16, **pico.fp8_sizes("hy4"))
    asked = Request.export(tmp_path / "hf", tmp_path / "out", target, "dynamic", keep_misfits=True)
    codes = plan_command(asked).plan.codes
    assert not [name for name in codes if "linear_gate" in name or "hc_" in name or "indexer" in name]
    assert {name.split(".")[-2] for name in codes} >= {"q_a_proj", "kv_b_proj", "o_proj", "down_proj"}
    execute(plan_command(asked))
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["layer_types"] == ["deepseek_sparse_attention"] * 3
    assert said.get("gated_mla", target == "sglang") and engine_named(target).lacks(said) == []
    assert engine_named(target).lacks(to_hf_config(pico.shape("hy4"), "bfloat16")) == []


_IN_BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "q_lora_rank": 128, "kv_lora_rank": 128} | dict.fromkeys(
    ("moe_intermediate_size", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_head_dim"), 128
)


@pytest.mark.parametrize("scheme", ["dynamic", *in_soak("block", "w4a16", "mxfp8", "nvfp4a16", "mxfp4")])
def test_what_transformers_cannot_multiply_with_inputs_in_bf16_is_refused(
    tmp_path: Path, scheme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps scales of this model in FP32, and in some formats compressed-tensors decodes to the dtype of a scale."""
    engine = engine_named("transformers")
    methods = dict(engine.methods)
    pico.save(tmp_path / "hf", "hy4", dtype=torch.bfloat16, **_IN_BLOCKS)
    asked = Request.export(tmp_path / "hf", tmp_path / "out", "transformers", scheme, keep_misfits=True)
    with monkeypatch.context() as without_the_rule:
        without = replace(methods["compressed-tensors"], in_fp32=None)
        without_the_rule.setitem(engine.methods, "compressed-tensors", without)
        execute(plan_command(asked))
    need_loader(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    fails = pytest.raises(RuntimeError, match="BFloat16 != float") if scheme in ("dynamic", "w4a16") else nullcontext()
    with fails as failed, torch.no_grad():
        loaded(torch.arange(3, 15).unsqueeze(0), use_cache=False)
    found = [each.rule.text for each in check(open_checkpoint(tmp_path / "out"), engine) if each.rule.fatal]
    assert [text.startswith("of this model it keeps in FP32") for text in found] == [True] * bool(failed)
    again = replace(asked, destination=tmp_path / "again")
    with pytest.raises(PrecisionError, match="does not load hy_v4 in compressed-tensors") if failed else nullcontext():
        plan_command(again)


@pytest.mark.soak
def test_no_other_model_of_transformers_keeps_scales_in_fp32() -> None:
    """By its sources, without importing them. A word is looked for anywhere in a name."""
    folder = Path(transformers.__file__).parent / "models"
    keeping = set()
    for file in folder.glob("*/modeling_*.py"):
        text = file.read_text(encoding="utf-8")
        lists = re.findall(r"_keep_in_fp32_modules(?:_strict)? = (\[[^]]*\])", text)
        words = [word for each in lists for word in ast.literal_eval(each)]
        if any(re.search(word, "weight_scale") for word in words):
            keeping.add(file.parent.name)
    rule = engine_named("transformers").methods["compressed-tensors"].in_fp32
    assert rule and keeping == {name.removesuffix("_text") for name in rule.models}
