"""Gemma 4: what its config.json says, in the words of published files and of transformers, and what is not computed."""

import json
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import run
from safetensors.torch import load_file
from trained_models import trained
from trainer_directories import hf_trainer
from transformers import AutoConfig, AutoModelForCausalLM

from precisionctl.architectures.families import from_hf_config, read_model, to_hf_config
from precisionctl.checkpoints.base import read_tensor
from precisionctl.checkpoints.megatron.carried_run import WithOptimizer
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import DamagedCheckpoint, RecipeError, ShapeMismatch, UnknownArchitecture
from precisionctl.model_shape import UntabledModel
from precisionctl.param import Parallelism
from precisionctl.recipe import ParallelSettings
from precisionctl.trainer.parallel.shards import check

PUBLISHED = pico.settings("gemma4")
"""In the words of published files."""


def as_saved(**changes: Any) -> dict[str, Any]:
    """As transformers writes it."""
    config: dict[str, Any] = AutoConfig.for_model(**PUBLISHED | changes).to_dict()
    return config


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_global_key_value_heads": None},
        {"num_global_key_value_heads": 4},
        {"global_head_dim": 16},
        {"global_head_dim": 16, "num_global_key_value_heads": None},
        {"num_hidden_layers": 12},
        {"num_hidden_layers": 8},
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
    ],
    ids=str,
)
def test_published_words_and_those_of_transformers_are_the_same_model(changes: dict[str, Any]) -> None:
    """The judge is the class: its layers' kinds, and the shapes of its heads."""
    published, saved = from_hf_config(PUBLISHED | changes), from_hf_config(as_saved(**changes))
    assert published == saved == from_hf_config(to_hf_config(saved, "bfloat16"))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**PUBLISHED | changes))
    for layer, module in enumerate(theirs.model.layers):
        attention, here = module.self_attn, saved.attention_of(saved.in_window(layer))
        assert saved.in_window(layer) == attention.is_sliding
        assert (attention.v_proj is None) == here.keys_are_values
        assert (attention.q_proj.out_features, attention.k_proj.out_features) == (here.query_size, here.key_size)
        assert attention.head_dim == here.kv_channels


def test_what_no_key_says_is_what_the_class_takes() -> None:
    said = {"model_type": "gemma4_text", "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
    told = AutoConfig.for_model(**said).to_dict()
    numbers = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    short = said | {name: told[name] for name in (*numbers, "num_attention_heads")}
    assert from_hf_config(short) == from_hf_config(told)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("hidden_size_per_layer_input", 16),
        ("num_kv_shared_layers", 1),
        ("attention_k_eq_v", False),
        ("attention_bias", True),
        ("use_bidirectional_attention", "all"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_another_gemma_4_is_refused_by_the_setting_s_name(setting: str, value: object, wrapped: bool) -> None:
    config = as_saved() | {setting: value}
    config = {"model_type": "gemma4", "text_config": config} if wrapped else config
    model = read_model(config, stored=["model.language_model.embed_tokens.weight"] if wrapped else [])
    assert isinstance(model, UntabledModel)
    with pytest.raises(UnknownArchitecture, match=f"no gemma4_text known here has {setting}={value!r}") as refused:
        _ = model.num_layers
    assert "has a table" not in str(refused.value)


def test_the_class_s_own_defaults_are_refused() -> None:
    """Those of E2B: an embedding for each layer."""
    with pytest.raises(UnknownArchitecture, match="has attention_k_eq_v=False"):
        from_hf_config(AutoConfig.for_model("gemma4_text").to_dict())
    less = {key: value for key, value in as_saved().items() if key != "hidden_size_per_layer_input"}
    with pytest.raises(UnknownArchitecture, match="has hidden_size_per_layer_input=256"):
        from_hf_config(less)


@pytest.mark.parametrize(
    "layers",
    [
        {"0": {"head_dim": 32}},
        {"0": {"head_dim": 32}, "2": {"head_dim": 32}},
        {"2": {"head_dim": 32, "intermediate_size": 7}},
        {"7": {"head_dim": 32}},
        {"x": {"head_dim": 32}},
    ],
    ids=str,
)
def test_single_layers_of_other_sizes_are_refused(layers: dict[str, Any]) -> None:
    with pytest.raises(UnknownArchitecture, match="is not one number and size of heads for all layers without"):
        from_hf_config(as_saved() | {"per_layer_config": layers})


@pytest.mark.parametrize("said", [3, [], {"2": 3}, {"2": {"head_dim": "x"}}, {"2": {"num_key_value_heads": -1}}])
def test_sizes_of_layers_that_are_none_are_damage(said: Any) -> None:
    with pytest.raises(DamagedCheckpoint):
        from_hf_config(as_saved() | {"per_layer_config": said})


@pytest.mark.parametrize(
    ("container", "sizes"),
    [
        ("torch_dist", Parallelism()),
        ("torch_dist", Parallelism(tensor=2, pipeline=2)),
        ("torch", Parallelism(tensor=2, pipeline=3)),
        ("torch", Parallelism(tensor=4)),
    ],
    ids=str,
)
def test_every_bit_comes_back_from_megatron(container: Any, sizes: Parallelism, tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "gemma4", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", container=container, parallelism=sizes)
    run(tmp_path / "megatron", tmp_path / "back", "hf", verify=True)
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("hf", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((tmp_path / side / "config.json").read_text()) for side in ("hf", "back")]
    assert configs[0] == configs[1]


def test_an_optimizer_goes_through_both_containers_and_has_no_state_of_a_layer_s_factor(tmp_path: Path) -> None:
    """transformers has the factor as a buffer, so a trainer's optimizer does not count it."""
    model, optimizer = trained("gemma4", dtype=torch.bfloat16)
    assert not any(name.endswith("layer_scalar") for name, _ in model.named_parameters())
    run(hf_trainer(tmp_path / "run", model, optimizer), tmp_path / "first", "megatron")
    sizes = Parallelism(tensor=2, pipeline=3)
    run(tmp_path / "first", tmp_path / "legacy", "megatron", container="torch", parallelism=sizes)
    run(tmp_path / "legacy", tmp_path / "second", "megatron", parallelism=Parallelism())
    first, second = (WithOptimizer(open_checkpoint(tmp_path / name)) for name in ("first", "second"))
    assert first.specs.keys() == second.specs.keys()
    assert all(torch.equal(read_tensor(first, name), read_tensor(second, name)) for name in first.specs)
    kept = [name for name in first.specs if name.endswith("layer_scalar")]
    assert kept == [f"decoder.layers.{layer}.layer_scalar" for layer in range(3)]


def test_ranks_divide_the_groups_of_both_kinds_of_attention(tmp_path: Path) -> None:
    model = from_hf_config(PUBLISHED)
    assert [each.num_query_groups for each in model.attentions] == [2, 4]
    with pytest.raises(RecipeError, match="2 query groups cannot be shared evenly by 4 ranks"):
        check(model.padded(4), ParallelSettings(tensor=4))
    pico.save(tmp_path / "hf", "gemma4", num_attention_heads=6, num_key_value_heads=6, num_global_key_value_heads=2)
    with pytest.raises(ShapeMismatch, match="6 heads in 2 query groups cannot be divided evenly among 3"):
        run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=Parallelism(tensor=3))
