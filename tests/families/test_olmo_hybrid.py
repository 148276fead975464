"""OLMo Hybrid: names and shapes of its files, published and as transformers saves them, and its config.json."""

from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import run
from in_memory import to_hf, to_megatron
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from precisionctl.architectures.families import from_hf_config
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.errors import UnknownArchitecture

MORE_VALUES = {"linear_num_value_heads": 8, "linear_value_head_dim": 16}
"""Than keys, as in the published models: 128 channels, beside 64."""


def in_memory(directory: Path) -> dict[str, Tensor]:
    """Of transformers' class, as it loads a directory."""
    loaded: dict[str, Tensor] = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).state_dict()
    return loaded


def test_what_transformers_saves_goes_to_megatron_and_is_written_under_published_names(tmp_path: Path) -> None:
    """Its thirds of convolutions are no query's, key's or value's, and its norm behind attention has another name."""
    theirs = pico.make("olmo-hybrid", dtype=torch.bfloat16, **MORE_VALUES)
    theirs.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    convolutions = [f"model.layers.1.linear_attn.{part}_conv1d.weight" for part in "qkv"]
    assert [len(saved[name]) for name in convolutions] == [86, 86, 84]
    assert "model.layers.0.feedforward_layer_norm.weight" in saved
    run(tmp_path / "saved", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    run(tmp_path / "saved", tmp_path / "straight", "hf")
    for folder in ("back", "straight"):
        back = load_file(tmp_path / folder / "model.safetensors")
        assert [len(back[name]) for name in convolutions] == [64, 64, 128]
        assert {name for name in back if name.endswith("norm.weight")} == {
            *("model.norm.weight", "model.layers.1.linear_attn.o_norm.weight"),
            *(f"model.layers.0.{name}.weight" for name in ("self_attn.q_norm", "self_attn.k_norm")),
            *(f"model.layers.0.post_{name}_layernorm.weight" for name in ("attention", "feedforward")),
            *(f"model.layers.1.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")),
        }
        loaded = in_memory(tmp_path / folder)
        assert loaded.keys() == theirs.state_dict().keys()
        assert all(torch.equal(loaded[name], values) for name, values in theirs.state_dict().items())


def test_published_files_come_back_to_the_bit(tmp_path: Path) -> None:
    theirs = pico.make("olmo-hybrid", dtype=torch.bfloat16, **MORE_VALUES)
    theirs.config.save_pretrained(tmp_path)
    tensors = dict(theirs.state_dict())
    joined = tensors.pop("model.layers.1.linear_attn.conv1d.weight")
    for part, values in zip("qkv", torch.split(joined, [64, 64, 128]), strict=True):
        tensors[f"model.layers.1.linear_attn.{part}_conv1d.weight"] = values.clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    reader = HuggingFaceReader(tmp_path)
    megatron = to_megatron(reader)
    assert torch.equal(megatron.tensors["decoder.layers.1.self_attention.conv1d.weight"], joined)
    for back in (to_hf(megatron).tensors, to_hf(reader).tensors):
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[name], values) for name, values in tensors.items())


NO_ROPE = (False, False)


@pytest.mark.parametrize(
    ("said", "rope_layers", "base"),
    [
        ({"rope_parameters": None, "rope_theta": None}, NO_ROPE, 1e4),
        ({"rope_parameters": {"rope_theta": None}}, NO_ROPE, 1e4),
        ({"rope_parameters": {"rope_theta": None, "rope_type": "default"}, "rope_theta": 5e5}, NO_ROPE, 1e4),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": None}, NO_ROPE, 1e4),
        ({"rope_parameters": None, "rope_theta": 5e5}, None, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, None, 5e5),
    ],
)
def test_whether_there_are_rotary_embeddings_is_what_transformers_makes_of_it(
    said: dict[str, Any], rope_layers: Any, base: float
) -> None:
    model = from_hf_config(pico.config("olmo-hybrid", **said))
    assert (model.rope_layers, model.rotary_base) == (rope_layers, base)
    config_class = type(AutoConfig.for_model("olmo_hybrid"))
    theirs = AutoModelForCausalLM.from_config(config_class.from_dict(pico.config("olmo-hybrid", **said)))
    assert (theirs.model.rotary_emb is None) == (rope_layers is not None)


def test_null_parameters_alone_are_refused_as_programs_differ_in_them() -> None:
    with pytest.raises(UnknownArchitecture, match="rope_parameters is null.*Say `rope_theta` beside it"):
        from_hf_config(pico.config("olmo-hybrid", rope_parameters=None))


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 9])
def test_layers_and_sizes_that_are_not_said_are_those_of_its_class(layers: int) -> None:
    told = pico.config("olmo-hybrid", num_hidden_layers=layers)
    less = {key: value for key, value in told.items() if key != "layer_types" and not key.startswith("linear_")}
    if layers == 1:
        assert from_hf_config(less).gdn.layers == (False,)  # type: ignore[union-attr]
    else:
        assert from_hf_config(less) == from_hf_config(type(AutoConfig.for_model("olmo_hybrid"))(**less).to_dict())


def test_a_net_without_a_gate_is_refused_by_name() -> None:
    with pytest.raises(UnknownArchitecture, match="linear_use_gate=False"):
        from_hf_config(pico.config("olmo-hybrid", linear_use_gate=False))
