"""Published words that engines ask config.json for and transformers does not write: exports say them, and `verify`
finds where they are missing."""

import json
from pathlib import Path
from typing import Any

import conversions
import pico
import pytest
import torch
from soaking import first
from transformers import AutoConfig

from precisionctl.architectures.families import from_hf_config, to_hf_config
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.engines.base import engines
from precisionctl.verify.engine_rules import check

ENGINES = engines()

_OF_MIMO = {
    "hybrid_layer_pattern": [0, 1, 0],
    "moe_layer_freq": [0, 0, 1],
    "sliding_window_size": 7,
    "swa_head_dim": 48,
}
SAID: dict[tuple[str, str], dict[str, Any]] = {
    ("vllm", "afmoe"): {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    ("sglang", "afmoe"): {"score_func": "sigmoid"},
    ("vllm", "deepseek-v3.2"): {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "first_k_dense_replace": 1},
    ("sglang", "exaone-moe"): {"is_moe_layer": [False, True, True, True]},
    ("vllm", "glm-moe-dsa"): {"indexer_rope_interleave": True, "index_topk_pattern": "FSF", "topk_method": "noaux_tc"},
    ("sglang", "glm-moe-dsa"): {"indexer_rope_interleave": True, "moe_layer_freq": 1, "scoring_func": "sigmoid"},
    ("vllm", "hy-v3"): {"first_k_dense_replace": 1, "expert_hidden_dim": 32, "qk_norm": True, "route_norm": True},
    ("sglang", "hy-v3"): {"first_k_dense_replace": 1, "qk_norm": True, "route_norm": True},
    ("vllm", "lfm2"): {"conv_dim": 64, "block_dim": 64},
    ("vllm", "mimo-v2-flash"): _OF_MIMO,
    ("vllm", "ministral3"): {"llama_4_scaling": {"original_max_position_embeddings": 8, "beta": 0.5}},
    ("sglang", "mimo-v2-flash"): _OF_MIMO | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ("vllm", "minimax-m2"): {"scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": 8},
    ("sglang", "minimax-m2"): {"scoring_func": "sigmoid", "use_qk_norm": True, "rotary_dim": 8},
}
"""What the classes of vLLM 0.33 and SGLang 0.5.23 ask config.json for, or take another model's without."""


@pytest.mark.parametrize(("target", "family"), first(6, [case for case in SAID if case[1] not in pico.ABSENT]))
def test_an_export_says_what_the_engine_asks_for_and_transformers_does_not_write(
    target: str, family: str, tmp_path: Path
) -> None:
    said, file = SAID[target, family], tmp_path / "source" / "config.json"
    pico.save(file.parent, family, dtype=torch.bfloat16)
    saved = {key: value for key, value in json.loads(file.read_text()).items() if key not in said}
    file.write_text(json.dumps(saved))
    assert {*ENGINES[target].lacks(saved)} >= said.keys()
    request = Request.export(file.parent, tmp_path / "out", target, "dynamic", keep_misfits=True)
    execute(plan_command(request))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: config[key] for key in said} == said and ENGINES[target].lacks(config) == []


def test_codes_that_come_back_say_what_engines_ask_for(tmp_path: Path) -> None:
    pico.save(tmp_path / "source", "deepseek-v3", dtype=torch.bfloat16)
    conversions.carry_out(Request.export(tmp_path / "source", tmp_path / "fp8", "vllm", "dynamic", keep_misfits=True))
    file = tmp_path / "fp8" / "config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "topk_method"}))
    conversions.run(tmp_path / "fp8", tmp_path / "back", "hf", precision="fp8")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["topk_method"] == "noaux_tc"


@pytest.mark.parametrize("family", [each for each in ("glm4-moe-lite", "muse-spark") if each not in pico.ABSENT])
def test_a_config_that_a_table_writes_says_what_engines_ask_for(family: str) -> None:
    said = {"num_shared_experts": 0} if family == "muse-spark" else {"first_k_dense_replace": 1}
    layers = {"mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2}
    described = AutoConfig.for_model(**pico.settings(family) | layers).to_dict()
    config = to_hf_config(from_hf_config(described), "bfloat16")
    for target in ("vllm", "sglang"):
        assert {key: config[key] for key in said} == said and ENGINES[target].lacks(config) == []
        assert ENGINES[target].lacks({key: value for key, value in config.items() if key not in said}) == [*said]


@pytest.mark.skipif("deepseek" in pico.ABSENT, reason="transformers has no DeepSeek-OCR 2")
def test_a_number_of_dense_layers_that_the_list_contradicts_is_found_and_corrected(tmp_path: Path) -> None:
    """Engines go by the number; the tensors are those of the list, by which transformers' class goes."""
    kinds = ["dense", "sparse", "sparse"]
    pico.save(tmp_path / "hf", "deepseek", dtype=torch.bfloat16, mlp_layer_types=kinds, first_k_dense_replace=2)
    of_number = {each.what for each in check(open_checkpoint(tmp_path / "hf"), ENGINES["vllm"]) if each.rule.fatal}
    request = Request.export(tmp_path / "hf", tmp_path / "out", "vllm", "dynamic", keep_misfits=True)
    conversions.carry_out(request)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["mlp_layer_types"], config["first_k_dense_replace"]) == (kinds, 1)
    of_number -= {each.what for each in check(open_checkpoint(tmp_path / "out"), ENGINES["vllm"])}
    assert of_number == {"first_k_dense_replace is 2"}


@pytest.mark.parametrize("said", [3, True, {}, [[]], "full"], ids=str)
def test_a_wrapper_without_a_table_may_say_anything_of_its_indexers(said: object) -> None:
    def asked(indexers: object) -> bool:
        text = {"model_type": "glm_moe_dsa", "indexer_types": indexers}
        return "index_topk_pattern" in ENGINES["vllm"].lacks({"text_config": text})

    assert asked(["full", "shared"]) and not asked(said)
