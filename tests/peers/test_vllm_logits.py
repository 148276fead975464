"""What vLLM's kernels for CPUs compute of each family's directory that was in Megatron's format meanwhile, in FP32: the
logits that our GPT computes. Where vLLM passes over a setting, it computes those of the value that it takes instead.

Of other families it has no kernels for CPUs (sparse attention, delta nets in FP32, experts without a gate, experts of
MiniMax-M2 and Laguna, Mamba-1), no sizes that a small model has (Llama 4's chunks of 128, latents of A.X K2 and Mistral
4), or its version of transformers does not know them. Further causes, all of them vLLM's:

- Bamba, MPT: it has no class of them any more
- Kimi Linear: what puts kernels for CPUs in the place of Triton's fails on an attribute of another package
- Step 3.5, DeepSeek-V4: the configs of this version and of transformers 5.19 do not go together; 0.33 asks for a GPU
"""

import json
import shutil
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
from torch.nn.functional import softplus
from transformers import AutoModelForCausalLM

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
    "phimoe": WIDE,
    "exaone4": WIDE | {"layer_types": ["full_attention"] * 4},
    "phi3-long": VLLM["phi3-long"]
    | {"rope_parameters": VLLM["phi3-long"]["rope_parameters"] | {"attention_factor": 1.5}},
    "phi3-long with a factor": VLLM["phi3-long"]
    | {"rope_parameters": VLLM["phi3-long"]["rope_parameters"] | {"factor": 1000.0}},
    "deepseek-v2": VLLM["deepseek-v2"]
    | {"rope_parameters": pico.YARN_ROPE | {"attention_factor": 1.5, "truncate": False}},
    "deepseek-v3": VLLM["deepseek-v3"] | {"rope_parameters": pico.LLAMA3_ROPE},
    "deepseek-v3 with a factor of 1": VLLM["deepseek-v3"]
    | {"rope_parameters": pico.YARN_ROPE | {"attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "deepseek-v3 with a factor of 1 alone": VLLM["deepseek-v3"]
    | {"rope_parameters": pico.YARN_ROPE | {"attention_factor": 1.0}},
    "deepseek-v3 with one magnitude": VLLM["deepseek-v3"]
    | {"rope_parameters": pico.YARN_ROPE | {"mscale_all_dim": 0.7}},
    **{family: VLLM[family] | {"rope_parameters": pico.LLAMA3_ROPE} for family in ("axk1", "glm4-moe-lite")},
    "mimo-v2-flash": WIDE
    | {
        "v_head_dim": 64,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "partial_rotary_factor": 1.0, "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
        },
    },
}
"""Settings that vLLM passes over, by family, and behind it what is said, if the family has several cases."""
LITTLE = ("axk1", "deepseek-v3", "glm4-moe-lite")
"""Those of whose logits the scaling of a few channels changes less than a hundredth."""
HEADS = ("glm4-moe", "deepseek-v3", "afmoe")
"""Families of which it makes a head of its own."""


def make(directory: Path, family: str, **changes: Any) -> None:
    """A directory whose names and config.json are ours, with the words of published files that vLLM asks for."""
    source, megatron = (directory.with_name(f"{directory.name}-{word}") for word in ("source", "megatron"))
    pico.save(source, family, dtype=torch.float32, **changes)
    if family == "axk1":  # whose published files have a norm behind dense MLPs too, which nobody computes
        file = source / "model.safetensors"
        tensors = load_file(file)
        unused = {"model.layers.0.post_mlp_layernorm.weight": torch.ones_like(tensors["model.norm.weight"])}
        save_file(tensors | unused, file, metadata={"format": "pt"})
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
    otherwise = {f"{name}-otherwise": (name.partition(" ")[0], changes) for name, changes in TAKEN_OTHERWISE.items()}
    cases = {family: (family, changes) for family, changes in VLLM.items()} | tied | otherwise
    for name, (family, changes) in cases.items():
        make(root / name, family, **changes)
    compute_in_vllm(environments.vllm_cpu(), TOKENS, {root / name: "float32" for name in cases})
    return root


@pytest.mark.parametrize("family", VLLM)
def test_vllm_computes_the_logits_of_a_family(served: Path, family: str) -> None:
    assert off_by(served / family, served / family) < 1e-5


@pytest.mark.parametrize("name", TAKEN_OTHERWISE)
def test_vllm_takes_a_setting_for_what_the_rule_says(served: Path, name: str) -> None:
    directory = served / f"{name}-otherwise"
    assert off_by(directory, directory) > (1e-3 if name.startswith(LITTLE) else 1e-2)
    config = json.loads((directory / "config.json").read_text())
    taken = {key: value for settings in ENGINE.fixed for key, value in settings.taken(config)}
    if taken.get("sliding_window") == 0:  # none, to vLLM, and not to transformers
        taken["sliding_window"] = None
    as_taken = served / f"{name}-as-taken"
    as_taken.mkdir()
    (as_taken / "config.json").write_text(json.dumps(config | taken))
    tensors = load_file(directory / "model.safetensors")
    if taken.keys() & {"attention_bias", "use_bias"}:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".bias")}
    if "lm_head_bias" in taken:
        del tensors["lm_head.bias"]
    save_file(tensors, as_taken / "model.safetensors", metadata={"format": "pt"})
    assert off_by(as_taken, directory) < 1e-5


BIASES = ("qwen3", "granite-moe", "granite-moe-shared", "granite-moe-swa", "hy-v3")


@pytest.mark.parametrize("family", BIASES)
def test_vllm_passes_over_biases(tmp_path: Path, family: str) -> None:
    """As transformers computes the model without them: that of Qwen 3's output alone, and of others all."""
    biased, other = tmp_path / "biased", tmp_path / "other"
    pico.save(biased, family, dtype=torch.float32, attention_bias=True, **WIDE)
    config = json.loads((biased / "config.json").read_text())
    words = to_hf_config(HuggingFaceReader(biased).model, "float32")
    config |= {key: words[key] for key in ENGINE.lacks(config) if key in words}
    (biased / "config.json").write_text(json.dumps(config))
    assert "attention_bias is True, and taken for False" in [each.what for each in ENGINE.passed_over(config)]
    compute_in_vllm(environments.vllm_cpu(), TOKENS, {biased: "float32"})
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config))
    tensors = load_file(biased / "model.safetensors")
    of_no_use = [name for name in tensors if name.endswith("o_proj.bias" if family == "qwen3" else "_proj.bias")]
    tensors |= {name: torch.zeros_like(tensors[name]) for name in of_no_use}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    found = computed(biased)["logits"]
    with torch.no_grad():
        stored, taken = (
            AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)(TOKENS, use_cache=False).logits[:, :-1]
            for each in (biased, other)
        )
    assert error(stored, found) > 1e-2 and error(taken, found) < 1e-5


def test_vllm_keeps_the_parameters_of_xielu_in_bf16(tmp_path: Path) -> None:
    """Apertus: whatever the model's dtype, it computes softplus of both in BF16."""
    directory = tmp_path / "apertus"
    make(directory, "apertus", **WIDE)
    compute_in_vllm(environments.vllm_cpu(), TOKENS, {directory: "float32"})
    found = computed(directory)["logits"]
    model, _ = load(HuggingFaceReader(directory), plain=True)
    with torch.no_grad():
        for name, alpha in model.named_parameters():
            if name.endswith(("alpha_p", "alpha_n")):
                beta = 0.5 if name.endswith("alpha_n") else 0.0  # what is added to it, in BF16
                rounded = (beta + softplus(alpha.bfloat16())).double() - beta
                alpha.copy_(rounded.expm1().log())
        assert error(model(TOKENS)[:, :-1, : found.shape[-1]], found) < 1e-5


def test_vllm_leaves_out_of_gemma_3n_alone_what_tokens_have_for_each_layer(tmp_path: Path) -> None:
    """And computes all else: embeddings of zeros, and the norm of what is added to them so much larger as the sum would
    be made smaller, are the same. The norm's epsilon is hidden_size times smaller there, so it is nothing here."""
    directory, without = tmp_path / "gemma3n", tmp_path / "without"
    make(directory, "gemma3n", **WIDE | {"intermediate_size": [512] * 6, "rms_norm_eps": 1e-9})
    compute_in_vllm(environments.vllm_cpu(), TOKENS, {directory: "float32"})
    assert off_by(directory, directory) > 1e-2
    shutil.copytree(directory, without)
    tensors = load_file(without / "model.safetensors")
    tensors["model.embed_tokens_per_layer.weight"].zero_()
    tensors["model.per_layer_projection_norm.weight"] *= 2**0.5
    save_file(tensors, without / "model.safetensors", metadata={"format": "pt"})
    assert off_by(without, directory) < 1e-5
    assert ENGINE.without_class(json.loads((directory / "config.json").read_text()))


@pytest.mark.parametrize("family", HEADS)
def test_vllm_takes_no_embedding_for_the_head(served: Path, family: str) -> None:
    directory = served / f"{family}-tied"
    assert off_by(directory, directory) > 0.5
    config = json.loads((directory / "config.json").read_text())
    assert [key for settings in ENGINE.fixed for key, _ in settings.taken(config)] == ["tie_word_embeddings"]
