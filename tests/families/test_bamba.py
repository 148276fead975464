"""Bamba: a layer of Hugging Face is two of Megatron's, and half of a head has positions."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_same_tensors, run
from gpt_models import assert_computes_as_transformers
from installed import BEFORE_5_23
from soaking import in_soak
from transformers import AutoConfig

from precisionctl.architectures.families import from_hf_config, from_megatron_args, to_hf_config
from precisionctl.architectures.megatron.megatron_args import to_megatron_args
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.param import Parallelism

_OLD = pico.ONE_GROUP["bamba"] if BEFORE_5_23 else {}


@pytest.mark.soak
@pytest.mark.parametrize(
    "said",
    [
        {"attn_layer_indices": []},
        {"attn_layer_indices": None},
        {"attn_layer_indices": [2, 0, 1]},
        {"mamba_n_groups": 1, "mamba_n_heads": 16, "mamba_d_head": 8},
        *in_soak(
            {"rms_norm_eps": 0.1, "tie_word_embeddings": True},
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "rope_theta": 5e5,
                    "factor": 2.0,
                    "partial_rotary_factor": 0.5,
                }
            },
            {"head_dim": 8, "attn_rotary_emb": 4},
        ),
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_to_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config("bamba", **_OLD | said), tmp_path)


def test_its_layers_are_two_of_megatrons_each() -> None:
    model = pico.shape("bamba")
    assert model.mamba is not None and model.mamba.pattern == "M-*-M-"
    written = to_hf_config(model, "bfloat16")
    assert (written["num_hidden_layers"], written["attn_layer_indices"]) == (3, [1])
    assert written["attn_rotary_emb"] == 8  # vLLM's rotary embeddings
    assert (
        AutoConfig.for_model(**written).layers_block_type
        == AutoConfig.for_model(**pico.settings("bamba")).layers_block_type
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("mamba_conv_bias", False), ("mamba_proj_bias", True), ("mamba_d_conv", 3), ("attention_bias", True)),
        *(("mlp_bias", True), ("time_step_limit", [0.001, float("inf")]), ("hidden_act", "gelu")),
        ("partial_rotary_factor", 1.0),  # beside the rotary parameters, where its class does not look
    ],
)
def test_what_the_table_does_not_say_is_refused_by_name(key: str, value: object) -> None:
    config = pico.config("bamba") | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(UnknownArchitecture, match=key):
        from_hf_config(config | {key: value})


@pytest.mark.parametrize(("key", "value"), [("attn_rotary_emb", 16), ("attn_layer_indices", [3])])
def test_what_contradicts_the_rest_is_one_error(key: str, value: object) -> None:
    with pytest.raises(DamagedCheckpoint, match=key):
        from_hf_config(pico.config("bamba") | {key: value})


@pytest.mark.parametrize("key", ["attn_layer_indices", "attn_rotary_emb", "num_hidden_layers", "mamba_expand"])
def test_junk_in_its_config_is_one_error(key: str) -> None:
    for junk in (-1, 0, 3.5, "", "M", [], [-1], [None], [1.0], {"a": 1}, True, None, [0] * 9999):
        with suppress(DamagedCheckpoint, UnknownArchitecture):
            from_hf_config(to_hf_config(pico.shape("bamba"), "bfloat16") | {key: junk})


@pytest.mark.parametrize(("pattern", "is_one"), [("M-*-M-", True), ("M--*M-", False), ("MM*-M-", False)])
def test_a_pattern_of_which_no_layers_can_be_made_is_no_bamba(pattern: str, is_one: bool) -> None:
    args = to_megatron_args(pico.shape("bamba").padded(1)) | {"hybrid_override_pattern": pattern}
    if is_one:
        assert from_megatron_args(args, 256, "args", "bamba").architecture == "bamba"
    else:
        with pytest.raises(UnknownArchitecture):
            from_megatron_args(args, 256, "args", "bamba")


@pytest.mark.parametrize("container", ["torch", *in_soak("torch_dist")])
def test_it_comes_back_from_ranks_and_from_stages_that_end_within_its_layers(tmp_path: Path, container: str) -> None:
    pico.save(tmp_path / "hf", "bamba", dtype=torch.bfloat16)
    ranks = Parallelism(tensor=2, pipeline=2)  # three blocks to each stage
    run(tmp_path / "hf", tmp_path / "m", "megatron", parallelism=ranks, container=container)
    run(tmp_path / "m", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
