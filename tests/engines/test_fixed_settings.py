"""Settings that vLLM refuses or passes over; logits show what it takes instead (tests/peers/test_vllm_logits.py)."""

import json
import re
from pathlib import Path
from typing import Any

import pico
import pytest
import repository
import torch
from conversions import carry_out
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.engines.base import engine_named
from precisionctl.verify.engine_rules import check

VLLM = engine_named("vllm")
PUBLISHED = [
    json.loads(line)
    for name in ("published_configs.jsonl", "published_wrappers.jsonl")
    for line in (repository.GOLDEN / name).read_text().splitlines()
]
WINDOWS = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda each: each["repository"])
def test_published_models_have_the_settings_that_vllms_classes_were_written_for(published: dict[str, Any]) -> None:
    found = VLLM.refused(published["config"]) + VLLM.passed_over(published["config"])
    one_token = ["sliding_window is 4096, and taken for 4097"]
    assert [each.what for each in found] == (one_token if published["config"]["model_type"] == "cohere2" else [])
    assert not any(each.rule.fatal for each in found)


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda each: each["repository"])
def test_published_models_have_the_keys_that_vllm_asks_for(published: dict[str, Any]) -> None:
    """Lists of layers are left out of the golden ones where no tensor depends on them: Hunyuan 4's; and what names code
    of their own, as DeepSeekMoE's has."""
    config = published["config"]
    if config["model_type"] == "deepseek":
        config = config | {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"}}
    assert VLLM.lacks(config) == (["layer_types"] if config["model_type"] == "hy_v4" else [])
    assert not VLLM.without_class(config)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"model_type": "olmoe", "norm_topk_prob": True}, "norm_topk_prob is True, and taken for False"),
        ({"model_type": "olmoe", "norm_topk_prob": False}, None),
        ({"model_type": "olmoe"}, None),
        ({"model_type": "gpt_oss", "swiglu_limit": 0.5}, "swiglu_limit is 0.5, and taken for 7.0"),
        ({"model_type": "gpt_oss", "layer_types": WINDOWS}, None),
        (
            {"model_type": "gpt_oss", "layer_types": WINDOWS[::-1]},
            f"layer_types is {WINDOWS[::-1]}, and taken for {WINDOWS}",
        ),
        ({"model_type": "qwen2_moe", "layer_types": WINDOWS[:1] * 2}, None),
        (
            {"model_type": "qwen2_moe", "layer_types": WINDOWS},
            f"layer_types is {WINDOWS}, and taken for {WINDOWS[1:] * 2}",
        ),
        ({"model_type": "cohere2", "sliding_window": 8, "layer_types": WINDOWS[1:]}, None),
        ({"model_type": "glm4_moe", "tie_word_embeddings": True}, "tie_word_embeddings is True, and taken for False"),
        ({"model_type": "llama", "tie_word_embeddings": True, "rms_norm_eps": 0.01}, None),
        ({"model_type": "exaone4", "sliding_window": 8, "layer_types": WINDOWS}, None),
        (
            {"model_type": "exaone4", "sliding_window": 8, "layer_types": WINDOWS[1:]},
            "sliding_window is 8, and taken for 0",
        ),
        ({"model_type": "exaone4", "sliding_window": None, "layer_types": WINDOWS[1:]}, None),
    ],
)
def test_a_setting_that_vllm_passes_over_is_found(config: dict[str, Any], what: str | None) -> None:
    assert [each.what for each in VLLM.passed_over(config)] == ([what] if what else [])


@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_moe", "qwen3"])
@pytest.mark.parametrize("first", [0, 1, 2, 3, None])
@pytest.mark.parametrize("layers", [1, 2, 30])
@pytest.mark.parametrize("on", [True, False])
def test_windows_in_some_layers_are_found_where_the_class_in_transformers_has_them(
    model_type: str, first: int | None, layers: int, on: bool
) -> None:
    said = {"num_hidden_layers": layers, "use_sliding_window": on, "sliding_window": 16}
    said |= {} if first is None else {"max_window_layers": first}
    kinds = AutoConfig.for_model(model_type, **said).layer_types
    find, instead = (VLLM.passed_over, ", and taken for False") if model_type == "qwen2_moe" else (VLLM.refused, "")
    whats = [each.what for each in find({"model_type": model_type, **said})]
    assert whats == ([f"use_sliding_window is True{instead}"] if len({*kinds}) == 2 else [])
    listed = find({"model_type": model_type, **said, "layer_types": kinds})
    assert len(listed) == len(whats)
    assert not find({"model_type": model_type, **said, "sliding_window": None})


LONG = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
CONTEXTS = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("said", "is_found"),
    [
        ({}, False),
        ({"attention_factor": 1.5}, True),
        ({"attention_factor": None}, False),
        ({"factor": 32.0}, False),
        ({"factor": 4.0}, True),
        ({"factor": 4.0, "attention_factor": (17 / 12) ** 0.5}, False),
        ({"type": "linear"}, False),
    ],
)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_a_factor_of_attention_of_longrope_is_found(key: str, said: dict[str, Any], is_found: bool) -> None:
    config = {"model_type": "phi3", **CONTEXTS, key: LONG | said}
    assert [each.what.partition(" is ")[0] for each in VLLM.passed_over(config)] == [key] * is_found


def test_the_factor_of_longropes_paper_is_not() -> None:
    """1.19024, as Phi-3's own code computes it of these contexts: the root of 1 + ln 32 / ln 4096 = 1 + 5 / 12."""
    scaling = LONG | {"attention_factor": (17 / 12) ** 0.5}
    assert not VLLM.passed_over({"model_type": "phi3", **CONTEXTS, "rope_scaling": scaling})


@pytest.mark.parametrize(
    ("said", "is_found"),
    [
        ({"rope_type": "default"}, False),
        ({"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}, False),
        ({"rope_type": "yarn", "mscale": 1.0}, False),
        ({"rope_type": "yarn", "mscale": 0.7}, True),
        ({"rope_type": "yarn", "mscale_all_dim": 0.7}, True),
        ({"rope_type": "yarn", "truncate": True, "attention_factor": 1.0}, True),
        ({"rope_type": "yarn", "attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}, True),
        ({"rope_type": "yarn", "attention_factor": 1.0, "mscale": 0.0}, False),
        ({"rope_type": "yarn", "attention_factor": 1.0, "factor": 1.0}, False),
        ({"rope_type": "yarn", "truncate": False}, True),
        ({"rope_type": "yarn", "attention_factor": 1.2}, True),
        ({"rope_type": "llama3"}, True),
        ({"type": "linear"}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "model_type", ["axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2"]
)
def test_what_is_not_deepseeks_yarn_is_found(model_type: str, said: dict[str, Any], is_found: bool) -> None:
    config = {"model_type": model_type, "rope_parameters": {"factor": 4.0} | said}
    assert len(VLLM.passed_over(config)) == is_found


def test_the_page_names_the_models() -> None:
    """A row of its table may be that of several rules."""
    page = (repository.DOCS / "engines.md").read_text(encoding="utf-8")
    section = page.partition("### Settings that vLLM passes over")[2].partition("\n### ")[0]
    rows = [{*re.findall(r"`(\w+)`", row)} for row in re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)[1:]]
    kinds = [{*settings.model_types} for settings in VLLM.fixed]
    assert [each for each in kinds if not any(each <= row for row in rows)] == []
    assert rows == [set().union(*(each for each in kinds if each <= row)) for row in rows]
    wrappers = section.partition("makes its own class of it: ")[2].partition(".")[0]
    assert re.findall(r"`(\w+)`", wrappers) == list(VLLM.wrappers)


def test_a_stored_head_of_gemma_2_is_refused_tied_or_not(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "gemma2", dtype=torch.bfloat16)
    assert not VLLM.refused({"model_type": "gemma2", "tie_word_embeddings": True})
    assert not [each for each in check(HuggingFaceReader(tmp_path / "hf"), VLLM) if each.rule.fatal]
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    (found,) = [each for each in check(HuggingFaceReader(tmp_path / "hf"), VLLM) if each.rule.fatal]
    assert (found.where, found.what) == ("lm_head.weight", "an output layer")


@pytest.mark.parametrize(
    ("family", "changes", "what"),
    [
        ("gemma2", {"tie_word_embeddings": False}, "an output layer"),
        ("qwen2-window", {"layer_types": WINDOWS * 2, "num_hidden_layers": 4}, "layer_types is "),
    ],
)
def test_no_command_is_told_to_serve_what_vllm_refuses(
    tmp_path: Path, family: str, changes: dict[str, Any], what: str
) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, **changes)
    planned = plan_command(Request.export(tmp_path / "hf", tmp_path / "out", "vllm", "dynamic"))
    (said,) = [note for note in planned.notes if "does not load it" in note]
    assert said.startswith(f"vLLM does not load it: {what}")
    assert not [note for note in planned.notes if "Serve it with" in note or "computes otherwise" in note]


def test_the_bias_of_phi_3_5_moes_head_is_a_remark() -> None:
    (found,) = VLLM.passed_over({"model_type": "phimoe", "lm_head_bias": True, "router_jitter_noise": 0.01})
    assert found.what == "lm_head_bias is True, and taken for False" and not found.rule.fatal


@pytest.mark.parametrize(("model_type", "taken"), [("cohere_compass", True), ("gptj", False)])
def test_what_a_class_asserts_of_the_head_is_refused(model_type: str, taken: bool) -> None:
    for said in (True, False):
        text = {"model_type": f"{model_type}_text", "tie_word_embeddings": said}
        found = VLLM.refused({"model_type": model_type, "tie_word_embeddings": said, "text_config": text})
        assert [each.what for each in found] == ([] if said == taken else [f"tie_word_embeddings is {said}"])


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_windows_of_a_qwen_vl_are_found_in_either_form(kind: str) -> None:
    said = {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    for config in (
        {"model_type": kind, **said},
        {"model_type": kind, "text_config": {"model_type": f"{kind}_text", **said}},
    ):
        assert [each.what for each in VLLM.refused(config)] == ["use_sliding_window is True"]


def test_the_text_model_of_a_wrapper_is_looked_at_where_vllm_makes_its_own_class_of_it() -> None:
    text = {"model_type": "qwen2", "layer_types": WINDOWS}
    what = [f"layer_types is {WINDOWS}"]
    assert [each.what for each in VLLM.refused({"model_type": "internvl", "text_config": text})] == what
    assert [each.what for each in VLLM.refused({"model_type": "internvl_chat", "llm_config": text})] == what
    assert not VLLM.refused({"model_type": "got_ocr2", "text_config": text})


HEAD = ["language_model.model.embed_tokens.weight", "language_model.lm_head.weight"]


def test_what_a_wrapper_says_of_the_head_is_looked_at() -> None:
    text = {"model_type": "lfm2", "tie_word_embeddings": True}
    config = {"model_type": "lfm2_vl", "tie_word_embeddings": False, "text_config": text}
    assert [each.what for each in VLLM.passed_over(config, HEAD)] == [
        "tie_word_embeddings is False, and taken for True"
    ]
    assert not VLLM.passed_over(config, HEAD[:1])


@pytest.mark.parametrize("model_type", ["lfm2", "lfm2_moe"])
@pytest.mark.parametrize("said", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("own", [{}, {"tie_embedding": True}, {"tie_embedding": False}])
def test_the_word_of_lfm2_for_a_head_of_its_own_is_read_as_in_transformers(
    model_type: str, said: dict[str, Any], own: dict[str, Any]
) -> None:
    found = VLLM.passed_over({"model_type": model_type, **said, **own})
    assert len(found) == (not AutoConfig.for_model(model_type, **said, **own).tie_word_embeddings)


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_tied_head_is_missed_only_where_none_is_stored(tmp_path: Path, is_stored: bool) -> None:
    pico.save(tmp_path / "hf", "olmoe", dtype=torch.bfloat16, tie_word_embeddings=True)
    if is_stored:
        tensors = load_file(tmp_path / "hf" / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    what = "tie_word_embeddings is True, and taken for False"
    assert (what in [each.what for each in check(HuggingFaceReader(tmp_path / "hf"), VLLM)]) is not is_stored
    planned = plan_command(Request.export(tmp_path / "hf", tmp_path / "out", "vllm", "dynamic"))
    assert any(what in note for note in planned.notes)  # of a tied model an export stores the embedding alone


def test_verify_refuses_it_and_an_export_says_it(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "olmoe", dtype=torch.bfloat16)
    what = "norm_topk_prob is True, and taken for False"
    assert [each.what for each in check(HuggingFaceReader(tmp_path / "hf"), VLLM) if each.rule.fatal] == [what]
    planned = plan_command(Request.export(tmp_path / "hf", tmp_path / "out", "vllm", "dynamic"))
    assert any(what in note for note in planned.notes)


@pytest.mark.parametrize(
    ("target", "family"),
    [
        (target, family)
        for target in ("vllm", "sglang")
        for family in ("glm4-moe-lite", "deepseek")
        if family not in pico.ABSENT
    ],
)
def test_dense_layers_behind_others_are_told_and_no_number_of_leading_ones_is_advised(
    tmp_path: Path, target: str, family: str
) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, mlp_layer_types=["dense", "sparse", "dense"])
    work = carry_out(Request.export(tmp_path / "hf", tmp_path / "out", target, "dynamic", keep_misfits=True))
    assert any("computes otherwise: mlp_layer_types is ['dense', 'sparse', 'dense']" in note for note in work.notes)
    found = [each for each in check(open_checkpoint(tmp_path / "out"), engine_named(target)) if each.rule.fatal]
    assert ["mlp_layer_types" in each.what for each in found if each.what != "a deepseek"] == [True]
    assert not any("export-inference" in each.rule.text for each in found)
    config = {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "dense", "sparse"]}
    assert not engine_named(target).passed_over(config) and "first_k_dense_replace" in engine_named(target).lacks(
        config
    )
