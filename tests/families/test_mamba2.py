"""Mamba-2: mixers alone. Heads of attention, for which Megatron asks, change nothing."""

import dataclasses
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_same_tensors, run
from gpt_models import assert_computes_as_transformers, assert_texts_are_apart
from installed import BEFORE_5_23
from soaking import in_soak

from precisionctl.architectures.families import from_hf_config, models_of_megatron_args
from precisionctl.architectures.megatron.megatron_args import to_megatron_args
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.model.same_model import differences
from precisionctl.param import Parallelism

_OLD = pico.ONE_GROUP["mamba2"] if BEFORE_5_23 else {}


@pytest.mark.soak
@pytest.mark.parametrize(
    "said",
    [
        {"n_groups": 1},
        {"num_heads": 16, "head_dim": 8},
        {"expand": 4, "num_heads": 64},
        {"layer_norm_epsilon": 0.1, "tie_word_embeddings": True},
        {"residual_in_fp32": False, "chunk_size": 16},
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_to_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config("mamba2", **_OLD | said), tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("use_bias", True), ("use_conv_bias", False), ("conv_kernel", 3), ("hidden_act", "gelu")),
        ("time_step_limit", [0.001, float("inf")]),
    ],
)
def test_what_the_table_does_not_say_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnknownArchitecture, match=key):
        from_hf_config(pico.config("mamba2") | {key: value})


@pytest.mark.parametrize("key", ["num_heads", "head_dim", "expand"])
@pytest.mark.parametrize("junk", [-1, 0, 3, 3.5, "auto", [], True], ids=str)
def test_junk_in_sizes_of_mixers_is_one_error(key: str, junk: object) -> None:
    with pytest.raises(DamagedCheckpoint):
        from_hf_config(pico.config("mamba2") | {key: junk})


def test_heads_that_no_layer_has_are_no_difference() -> None:
    """Nor are positions of keys, and an MLP's activation: Megatron-LM has arguments for all of them."""
    model = pico.shape("mamba2")
    other = dataclasses.replace(model, num_attention_heads=1, num_query_groups=1, kv_channels=8, ffn_hidden_size=8)
    other = dataclasses.replace(other, rope_layers=None, activation="squared_relu", gated_linear_unit=False)
    assert differences(model, other) == {} == differences(other, model)
    args = to_megatron_args(other.padded(1))
    assert {each.architecture for each in models_of_megatron_args(args, 256, "args")} == {"mamba2", "nemotron_h"}


@pytest.mark.soak
def test_texts_that_share_a_row_are_what_they_are_alone(tmp_path: Path) -> None:
    assert_texts_are_apart("mamba2", tmp_path)


@pytest.mark.parametrize("container", ["torch", *in_soak("torch_dist")])
def test_a_checkpoint_comes_back_from_any_division(tmp_path: Path, container: str) -> None:
    pico.save(tmp_path / "hf", "mamba2", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "m", "megatron", parallelism=Parallelism(2, 2), container=container)
    run(tmp_path / "m", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
