"""Sarvam 30B and 105B: config.json in published words and in transformers', both spellings of tensors, divisions, and
directories that transformers saved, for engines, which have classes of their own for them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_same_tensors, assert_there_and_back, carry_out, run
from gpt_models import assert_computes_as_transformers
from safetensors.torch import load_file, save_file
from soaking import in_soak
from transformers import AutoConfig, AutoModelForCausalLM

from precisionctl.architectures.families import from_hf_config, to_hf_config
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.request import Request
from precisionctl.engines.base import engine_named
from precisionctl.errors import DamagedCheckpoint, PrecisionError, UnknownArchitecture
from precisionctl.param import Parallelism
from precisionctl.verify.compare import compare
from precisionctl.verify.engine_rules import check

pytestmark = pytest.mark.skipif("sarvam-moe" in pico.ABSENT, reason="this transformers has no Sarvam")

WORDS = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "attention_bias": "use_qkv_bias",
    "num_nextn_predict_layers": "num_mtp_layers",
}
BESIDE = {
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 32,
}
"""What published files say beside that."""

ALONE = {"sarvam-moe": ("use_qkv_bias", "use_bias", "embedding_dropout"), "sarvam-mla": ("q_head_dim",)}

NOT_SAID = ("rope_parameters", "head_dim", "is_encoder_decoder")
DEEPSEEK_YARN = {name: value for name, value in pico.YARN_ROPE.items() if name not in ("rope_type", "rope_theta")}


def published(family: str, **said: Any) -> dict[str, Any]:
    """The config.json of a family as its published models have it."""
    told = pico.config(family) | said
    config = {WORDS.get(key, key): value for key, value in told.items() if key not in NOT_SAID}
    rope = {"rope_theta": told["rope_parameters"]["rope_theta"]}
    if family == "sarvam-mla":
        config["attention_bias"] = config.pop("use_qkv_bias")
        scaling = {"mscale": 1.0, "mscale_all_dim": 1.0, **DEEPSEEK_YARN, "type": "deepseek_yarn"}
        return {**config, **BESIDE, **rope, "rope_scaling": scaling, "head_dim": 24, "q_head_dim": 24}
    return {**config, **BESIDE, **rope, "head_dim": told["head_dim"], "use_bias": False, "embedding_dropout": 0.0}


@pytest.mark.parametrize("family", ["sarvam-moe", "sarvam-mla"])
def test_published_words_say_what_transformers_own_say(family: str) -> None:
    told, said = pico.config(family), published(family)
    model = from_hf_config(said)
    assert model == from_hf_config(told) == from_hf_config(AutoConfig.for_model(**said).to_dict())
    written = to_hf_config(model, "bfloat16")
    for key in ("num_experts", "num_shared_experts", *BESIDE, "rope_theta", "head_dim", *ALONE[family]):
        assert written[key] == said[key], key
    if family == "sarvam-mla":
        scaling = said["rope_scaling"]
        assert written["rope_scaling"] == {"beta_fast": 32.0, "beta_slow": 1.0} | scaling
        later = {key: value for key, value in scaling.items() if key != "type"} | {"rope_type": scaling["type"]}
        assert from_hf_config(said | {"rope_scaling": later}) == model
    for key, word in WORDS.items():
        if key in told and word in said:
            with pytest.raises(DamagedCheckpoint, match=f"{word} is .* and {key}, which is the same"):
                from_hf_config(said | {key: 5})


@pytest.mark.parametrize("family", ["sarvam-moe", "sarvam-mla"])
def test_verify_takes_both_words_for_the_same(family: str, tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16)
    shutil.copytree(tmp_path / "hf", tmp_path / "published")
    (tmp_path / "published" / "config.json").write_text(json.dumps(published(family)))
    found = compare(open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "published"))
    assert found.equal and not found.settings
    (tmp_path / "published" / "config.json").write_text(json.dumps(published(family) | {"routed_scaling_factor": 1.0}))
    found = compare(open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "published"))
    assert any("scaling_factor" in line for line in found.settings)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("sarvam-moe", {"use_qk_norm": False}),
        ("sarvam-moe", {"attention_bias": True}),
        ("sarvam-moe", {"n_group": 4, "topk_group": 2}),
        ("sarvam-moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        *in_soak(("sarvam-mla", {"q_lora_rank": 24}), ("sarvam-mla", {"rope_parameters": pico.YARN_ROPE})),
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_to_transformers(family: str, said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config(family, **said), tmp_path)


@pytest.mark.parametrize(
    ("family", "error", "said"),
    [
        ("sarvam-moe", UnknownArchitecture, {"use_bias": True}),
        ("sarvam-moe", UnknownArchitecture, {"score_function": "softmax"}),
        ("sarvam-moe", UnknownArchitecture, {"moe_router_enable_expert_bias": False}),
        ("sarvam-moe", UnknownArchitecture, {"num_nextn_predict_layers": 1}),
        ("sarvam-moe", DamagedCheckpoint, {"moe_shared_expert_intermediate_size": 64}),
        ("sarvam-mla", UnknownArchitecture, {"norm_topk_prob": False}),
        ("sarvam-mla", UnknownArchitecture, {"rope_interleave": False}),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused_by_its_name(family: str, error: type[Exception], said: dict[str, Any]) -> None:
    with pytest.raises(error, match=next(iter(said))):
        from_hf_config(pico.config(family, **said))


def test_names_in_memory_are_read_too_and_published_ones_written(tmp_path: Path) -> None:
    """Queries, keys and values are one tensor in files, also their biases."""
    model = pico.make_and_save(tmp_path / "hf", "sarvam-moe", dtype=torch.bfloat16, attention_bias=True)
    names = load_file(tmp_path / "hf" / "model.safetensors").keys()
    assert {f"model.layers.0.attention.query_key_value.{kind}" for kind in ("weight", "bias")} < names
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    run(tmp_path / "m", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    save_file(dict(model.state_dict()), tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    run(tmp_path / "hf", tmp_path / "m2", "megatron")
    assert_same_tensors(tmp_path / "m", tmp_path / "m2")


@pytest.mark.parametrize("family", ["sarvam-mla", *in_soak("sarvam-moe")])
def test_a_checkpoint_comes_back_from_any_division(tmp_path: Path, family: str) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16)
    assert_there_and_back(tmp_path / "hf", parallelism=Parallelism(2, 1, expert=2))


WHOLE = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}


@pytest.mark.parametrize("family", ["sarvam-moe", *in_soak("sarvam-mla")])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_get_their_class_and_its_words(tmp_path: Path, engine: Any, family: str) -> None:
    config = pico.make(family).config
    lacks = engine_named(engine).lacks({**config.to_dict(), "architectures": ["Glm4MoeForCausalLM"]})
    assert {"architectures", "num_experts", "num_shared_experts"} <= {*lacks}
    assert engine_named(engine).lacks(to_hf_config(from_hf_config(config.to_dict()), "bfloat16")) == []
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, **WHOLE, **pico.fp8_sizes(family))
    carry_out(Request.export(tmp_path / "hf", tmp_path / "out", engine, "dynamic"))
    out = json.loads((tmp_path / "out" / "config.json").read_text())
    assert from_hf_config(out) == from_hf_config(json.loads((tmp_path / "hf" / "config.json").read_text()))
    assert out["architectures"] == ["SarvamMoEForCausalLM" if family == "sarvam-moe" else "SarvamMLAForCausalLM"]
    findings = check(open_checkpoint(tmp_path / "out"), engine_named(engine))
    assert [each.where for each in findings if each.rule.fatal] == []


def test_transformers_deals_out_a_scale_for_each_row_alone(tmp_path: Path) -> None:
    """Blocks of rows it takes for so many rows, and then codes for weights, without an error."""
    source = pico.make_and_save(tmp_path / "hf", "sarvam-moe", dtype=torch.bfloat16, **WHOLE, head_dim=64)
    with pytest.raises(PrecisionError, match="query_key_value"):
        carry_out(Request.export(tmp_path / "hf", tmp_path / "out", "transformers", "block"))
    carry_out(Request.export(tmp_path / "hf", tmp_path / "out", "transformers", "dynamic"))
    tokens = torch.arange(24).view(2, 12) * 7 % 250
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    with torch.no_grad():
        expected, found = source(tokens).logits.float(), loaded(tokens).logits.float()
    assert (expected - found).norm() < 0.2 * expected.norm()
