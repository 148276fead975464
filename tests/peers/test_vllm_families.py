"""Families of the last releases, and those of which vLLM asks for words that transformers does not write, in vLLM's own
config parser and weight loader: every stored tensor is found in its parameters, codes as the same codes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import any_models
import environments
import pico
import pytest
import tiny_wrappers
import torch
from in_vllm import left_out_of, load_in_vllm, out_of

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.engines.base import engine_named
from precisionctl.verify.engine_rules import check

FAMILIES: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(("afmoe", "deepseek-v3.2", "exaone-moe", "glm-moe-dsa", "hy-v3", "hy4", "lfm2-moe"), {}),
    **dict.fromkeys(("qwen3-next", "qwen3-5", "qwen3-5-moe", "llama4", "gemma4", "gemma4-moe", "granite-moe"), {}),
    "gemma3n": {},
    **dict.fromkeys(("granite-hybrid", "falcon-h1", "jamba", "ernie4-5-moe", "cohere2-moe", "hunyuan-moe"), {}),
    **dict.fromkeys(("flex-olmo", "phimoe", "youtu", "kolibri1"), {}),
    **dict.fromkeys(("mellum", "mimo-v2-flash", "minimax-m2", "mistral4", "muse-glimmer", "nemotron-nas"), {}),
    "minicpm3": dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 64
    ),
    "deepseek": {},
    "lfm2": {"tie_word_embeddings": True},  # vLLM knows no other
    "step3p5": {"swiglu_limits": [0.0, 0.0, 0.0, 7.0]},  # nor this
    "glm4-moe-lite": {"mlp_layer_types": ["dense", "sparse", "sparse"]},  # others vLLM does not know
}
WRAPPERS: Mapping[str, dict[str, Any]] = {
    "exaone4_5": {},
    "glm5_next": {"indexer_types": ["full"] * 4},  # vLLM has one in every layer
    "muse_glimmer": {},
    "qwen3_5_moe": {
        "rope_parameters": tiny_wrappers.MROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.25}
    },
}
"""With what vLLM and transformers' class both compute; Kimi K3, Flint and Qwen4-Exp ask for a GPU's packages, and vLLM
takes the published class of Step 3.7's config alone."""
BLOCKS: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3-next", "qwen3-5-moe", "glm4-moe", "ernie4-5-moe", "llama4", "mixtral", "gemma4-moe"), {}),
    "glm4-moe-lite": {
        **FAMILIES["glm4-moe-lite"],
        "kv_lora_rank": 128,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 128,
        "v_head_dim": 64,
    },
}
"""Families with experts, which are whole blocks of FP8. A part of Gemma 4's attention is misfits, and its keys are its
values."""
WHOLE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 128),
}


ALONE = ("mamba", "falcon-mamba")
"""Families of which it takes no codes."""

WITHOUT_NAMES = {"minicpm3": "q_a_proj", "deepseek": "o_proj"}
"""Families of which vLLM makes linears without a name, and one of these."""


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, made = tmp_path_factory.mktemp("vllm"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(any_models.SMALL, "merge_size", 1)  # vLLM compares a projector with the tower before it
        for kinds, save in ((FAMILIES, pico.save), (WRAPPERS, tiny_wrappers.save)):
            for kind, changes in kinds.items():
                save(root / kind, kind, dtype=torch.bfloat16, **changes)
                made[kind] = root / f"{kind}-fp8"
                any_models.export(root / kind, made[kind], keep_misfits=True)
        for family, changes in BLOCKS.items():
            source, made[f"{family} block"] = root / f"{family}-whole", root / f"{family}-block"
            pico.save(source, family, dtype=torch.bfloat16, **WHOLE | changes)
            any_models.export(source, made[f"{family} block"], "block", keep_misfits=True)
        for family, part in WITHOUT_NAMES.items():
            made[f"{family} without {part}"] = root / f"{family}-without"
            exclude = (f"*.{part}",)
            any_models.export(root / family, root / f"{family}-without", target="sglang", exclude=exclude)
        for family in ALONE:
            made[family] = root / family
            pico.save(made[family], family, dtype=torch.bfloat16)
        made["axk1"] = root / "axk1"
        pico.save(made["axk1"], "axk1", dtype=torch.bfloat16)
        tiny_wrappers.save(root / "spark", "muse_spark", dtype=torch.bfloat16)
        made["muse_spark"] = root / "spark-fp8"
        any_models.export(root / "spark", made["muse_spark"], target="transformers", keep_misfits=True)
        config = json.loads((made["muse_spark"] / "config.json").read_text())
        config["text_config"]["num_shared_experts"] = 0
        (made["muse_spark"] / "config.json").write_text(json.dumps(config))
    load_in_vllm(environments.vllm(), *made.values())
    return made


@pytest.mark.parametrize("kind", [*FAMILIES, *WRAPPERS, *(f"{family} block" for family in BLOCKS)])
def test_vllm_holds_every_tensor_of_an_export(exports: dict[str, Path], kind: str) -> None:
    stored = any_models.stored(exports[kind])
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()) > 0
    assert left_out_of(exports[kind], stored) == []


@pytest.mark.parametrize("family", ALONE)
def test_vllm_holds_every_tensor_of_a_model_that_has_no_codes(exports: dict[str, Path], family: str) -> None:
    assert left_out_of(exports[family], any_models.stored(exports[family])) == []


@pytest.mark.parametrize("family", WITHOUT_NAMES)
def test_vllm_keeps_no_linear_in_bf16_that_it_makes_without_a_name(exports: dict[str, Path], family: str) -> None:
    out = out_of(exports[f"{family} without {WITHOUT_NAMES[family]}"])
    error = out.with_name(f"{out.name}.error").read_text()
    assert "given nothing for" in error and f"self_attn.{WITHOUT_NAMES[family]}.weight_scale" in error
    (linears,) = (alone.linears for kind, alone in engine_named("vllm").codes_alone.items() if kind == family)
    assert WITHOUT_NAMES[family] in linears


def test_vllm_asks_for_a_norm_of_axk1_that_transformers_does_not_save(exports: dict[str, Path]) -> None:
    error = out_of(exports["axk1"]).with_name("axk1.out.error").read_text()
    assert "given nothing for ['model.layers.0.post_mlp_layernorm.weight']" in error


def test_vllm_loads_no_codes_of_muse_spark_but_modelopts(exports: dict[str, Path]) -> None:
    error = out_of(exports["muse_spark"]).with_name(f"{out_of(exports['muse_spark']).name}.error").read_text()
    assert "only supports NVFP4" in error
    found = check(open_checkpoint(exports["muse_spark"]), engine_named("vllm"))
    assert "codes in a muse_spark" in [each.what for each in found if each.rule.fatal]
