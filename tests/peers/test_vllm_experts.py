"""Families with experts, exported in each scheme that has no blocks of FP8, in vLLM's own config parser and weight
loader (test_vllm_families.py has those): it fills every parameter of its modules, from every tensor that is stored."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import any_models
import environments
import in_memory
import pico
import pytest
import torch
from in_vllm import SCALES, left_out_of, load_in_vllm, out_of
from safetensors.torch import load_file

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.engines.base import engine_named
from precisionctl.fp8 import sidecar
from precisionctl.verify.engine_rules import check

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 256),
    **dict.fromkeys(("moe_intermediate_size", "q_lora_rank", "kv_lora_rank"), 128),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 64),
}
SHARED = {"shared_expert_intermediate_size": 128}
FAMILIES: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek-v3", "glm4-moe", "mixtral", "ernie4-5-moe", "gemma4-moe", "llama4"), {}),
    "gpt-oss": {"swiglu_limit": 7.0},  # vLLM knows no other
    "glm4-moe-lite": {"mlp_layer_types": ["dense", "sparse", "sparse"]},  # nor others of these
    "minimax-m2": {"rotary_dim": 32},
    **dict.fromkeys(("qwen3-next", "qwen3-5-moe"), SHARED),
}
SCHEMES = ("static", "nvfp4", "nvfp4a16", "mxfp4", "w4a16", "mxfp8")
CASES = [(family, scheme) for family in FAMILIES for scheme in SCHEMES]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("vllm")
    made = {(family, scheme): root / f"{family}-{scheme}" for family, scheme in CASES}
    for family, changes in FAMILIES.items():
        pico.save(root / family, family, dtype=torch.bfloat16, **SIZES | changes)
        sidecar.write(root / family / sidecar.RELATIVE, in_memory.recorded(HuggingFaceReader(root / family)))
    for (family, scheme), out in made.items():
        any_models.export(root / family, out, scheme, keep_misfits=True)
    load_in_vllm(environments.vllm(), *made.values())
    return made


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_vllm_holds_every_tensor_of_experts(exports: dict[tuple[str, str], Path], case: tuple[str, str]) -> None:
    directory, (family, scheme) = exports[case], case
    stored = any_models.stored(directory)
    experts = [name for name in stored if ".experts." in name and name.endswith("scale")]
    assert bool(experts) == (family not in ("gpt-oss", "llama4"))  # of which vLLM reads values, or one tensor
    assert left_out_of(directory, stored) == []
    assert not [each for each in check(open_checkpoint(directory), engine_named("vllm")) if each.rule.fatal]
    if scheme in ("static", "nvfp4", "nvfp4a16"):  # what it computes as one has one scale, or it takes the largest
        for name, values in load_file(out_of(directory)).items():
            if name.endswith(SCALES) and values.dtype == torch.float32 and values.numel() > 1:
                rows = values if "routed_experts" in name else values.reshape(1, -1)
                assert all(len(row.unique()) == 1 for row in rows), name
