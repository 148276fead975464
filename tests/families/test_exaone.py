"""EXAONE 3: published words of config.json and those of transformers, both spellings of tensors, and a directory that
transformers saved, for engines, which have a class of their own for it."""

import json
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_same_tensors, carry_out, run
from gpt_models import assert_computes_as_transformers
from judges import LLAMA_3_1
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from precisionctl.architectures.families import from_hf_config, to_hf_config
from precisionctl.commands.request import Request
from precisionctl.errors import DamagedCheckpoint

pytestmark = pytest.mark.skipif("exaone" in pico.ABSENT, reason="this transformers has no EXAONE 3")

WORDS = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function"}

_GATE_AND_UP = ("mlp.c_fc_0", "mlp.c_fc_1")


def published(config: dict[str, Any]) -> dict[str, Any]:
    return {WORDS.get(key, key): value for key, value in config.items()}


def test_published_words_say_what_transformers_own_say() -> None:
    told = pico.config("exaone", rms_norm_eps=1e-3)
    model = from_hf_config(told)
    assert from_hf_config(published(told)) == model
    assert AutoConfig.for_model(**published(told)).to_dict() == AutoConfig.for_model(**told).to_dict()
    written = to_hf_config(model, "bfloat16")
    assert written["architectures"] == ["ExaoneForCausalLM"] and written.keys() >= {*WORDS.values()}
    with pytest.raises(DamagedCheckpoint, match="num_layers is 3 and num_hidden_layers, which is the same"):
        from_hf_config(told | {"num_layers": 3})


@pytest.mark.soak
@pytest.mark.parametrize(
    "said", [{"rope_parameters": LLAMA_3_1}, {"tie_word_embeddings": True}, {"mlp_bias": True}], ids=str
)
def test_a_setting_means_what_it_means_to_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config("exaone", **said), tmp_path)


def test_names_in_memory_are_read_too_and_published_ones_written(tmp_path: Path) -> None:
    model = pico.make_and_save(tmp_path / "hf", "exaone", dtype=torch.bfloat16, tie_word_embeddings=True)
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    run(tmp_path / "m", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    assert all(name.startswith("transformer.") for name in load_file(tmp_path / "hf" / "model.safetensors"))
    in_memory = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(in_memory, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    run(tmp_path / "hf", tmp_path / "m2", "megatron")
    assert_same_tensors(tmp_path / "m", tmp_path / "m2")


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_get_their_class_and_its_words(tmp_path: Path, engine: Any) -> None:
    """And one scale for what they fuse, under EXAONE's names."""
    pico.save(tmp_path / "hf", "exaone", dtype=torch.bfloat16, hidden_size=128, intermediate_size=128)
    carry_out(Request.export(tmp_path / "hf", tmp_path / "out", engine, "nvfp4a16"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["ExaoneForCausalLM"]
    assert [config[word] for word in WORDS.values()] == [config[word] for word in WORDS]
    found = load_file(tmp_path / "out" / "model.safetensors")
    for fused in (("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"), _GATE_AND_UP):
        assert len({float(found[f"transformer.h.0.{linear}.weight_global_scale"]) for linear in fused}) == 1
