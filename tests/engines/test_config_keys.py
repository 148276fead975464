"""Keys of config.json that engines look for and transformers 5 leaves out: exports have them, checkers miss them."""

import json
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from transformers import AutoConfig

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.engines.base import engines
from precisionctl.verify.engine_rules import check

PUBLISHED = {  # deepseek-ai/DeepSeek-V3, deepseek-ai/DeepSeek-V2: config.json
    "deepseek-v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "deepseek-v2-groups": {"topk_method": "group_limited_greedy", "scoring_func": "softmax", "moe_layer_freq": 1},
}
SIZES = {"q_lora_rank": 32, "qk_rope_head_dim": 16, "moe_intermediate_size": 48}


def config_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def export(source: Path, target: str, scheme: str = "dynamic") -> Path:
    out = source.with_name(f"{source.name}-{target}")
    execute(plan_command(Request.export(source, out, target, scheme, keep_misfits=True)))  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize("family", PUBLISHED)
@pytest.mark.parametrize("target", ["vllm", "sglang"])
def test_routing_is_said_as_the_published_models_say_it(tmp_path: Path, family: str, target: str) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, **SIZES)
    out, engine = export(tmp_path / "hf", target), engines()[target]
    config, before = config_of(out), config_of(tmp_path / "hf")
    added = {key: value for key, value in config.items() if key not in {*before, "quantization_config"}}
    assert added.items() <= PUBLISHED[family].items()
    assert PUBLISHED[family].items() <= config.items() if target == "sglang" else True
    assert not any(found.rule.fatal for found in check(HuggingFaceReader(out), engine))
    for key in added:
        (out / "config.json").write_text(json.dumps({name: value for name, value in config.items() if name != key}))
        (finding,) = [found for found in check(HuggingFaceReader(out), engine) if found.rule.fatal]
        assert finding.what == f"no {key}"
    assert added or (family, target) == ("deepseek-v2-groups", "vllm")


@pytest.mark.parametrize("family", ["llama-3", "phi3-long", "deepseek-v3", "gemma3", "yi", "glm4"])
def test_rotary_keys_of_transformers_4_say_what_those_of_5_do(tmp_path: Path, family: str) -> None:
    """TensorRT-LLM 1.2 has transformers 4.57, which knows no `rope_parameters`."""
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, **(SIZES if family == "deepseek-v3" else {}))
    out = export(tmp_path / "hf", "tensorrt-llm", "mxfp8" if family == "deepseek-v3" else "dynamic")
    config, before = config_of(out), config_of(tmp_path / "hf")
    theirs = [AutoConfig.from_pretrained(path).rope_parameters for path in (tmp_path / "hf", out)]
    assert theirs[0].items() <= theirs[1].items() and "rope_theta" not in before
    if family == "gemma3":  # whose keys differ by kinds of layers
        assert config["rope_parameters"] == before["rope_parameters"] and "rope_scaling" not in config
        return
    assert config["rope_theta"] == before["rope_parameters"]["rope_theta"]
    scaled = before["rope_parameters"]["rope_type"] != "default"
    assert ("rope_scaling" in config) == scaled
    older = config.get("rope_scaling", {}) | config  # base and share of a head stood beside the scaling
    older = {"partial_rotary_factor": 1.0, "rope_type": "default"} | older
    assert all(older[key] == value for key, value in before["rope_parameters"].items())
    assert not [found.what for found in check(HuggingFaceReader(out), engines()["tensorrt-llm"])]
    (out / "config.json").write_text(json.dumps(before | {"quantization_config": config["quantization_config"]}))
    missed = {found.what for found in check(HuggingFaceReader(out), engines()["tensorrt-llm"])}
    assert {"no rope_theta"} <= missed


def test_what_a_config_says_stays(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-3", dtype=torch.bfloat16)
    config = config_of(tmp_path / "hf") | {"rope_theta": 12345.0, "_note": "ours"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    out = config_of(export(tmp_path / "hf", "tensorrt-llm"))
    assert (out["rope_theta"], out["_note"]) == (12345.0, "ours")
