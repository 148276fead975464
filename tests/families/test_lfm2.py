"""LFM2: its config.json, which says sizes in several words, and short convolutions of texts that share rows."""

from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_there_and_back, run
from gpt_models import assert_texts_are_apart
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from precisionctl.architectures.families import from_hf_config
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, ShapeMismatch, UnknownArchitecture
from precisionctl.param import Parallelism

FAMILIES = ("lfm2", "lfm2-moe")


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"block_ff_dim": 200},
        {"block_ff_dim": 200, "block_auto_adjust_ff_dim": False},
        {"block_auto_adjust_ff_dim": False},
        {"block_multiple_of": 7},
        {"block_ffn_dim_multiplier": 1.3},
    ],
    ids=str,
)
def test_an_mlp_has_the_channels_that_transformers_gives_it(said: dict[str, Any]) -> None:
    theirs = AutoModelForCausalLM.from_config(type(AutoConfig.for_model("lfm2")).from_dict(pico.config("lfm2", **said)))
    found = from_hf_config(pico.config("lfm2", **said)).ffn_hidden_size
    assert found == theirs.model.layers[0].feed_forward.w1.out_features


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "said",
    [
        *({"tie_embedding": each, "tie_word_embeddings": other} for each, other in ((True, False), (False, True))),
        {"tie_word_embeddings": False},
    ],
    ids=str,
)
def test_the_output_layer_is_the_embedding_where_transformers_takes_it_so(family: str, said: dict[str, Any]) -> None:
    config_class = type(AutoConfig.for_model(pico.settings(family)["model_type"]))
    assert from_hf_config(pico.config(family, **said)).tied_embeddings == config_class(**said).tie_word_embeddings


@pytest.mark.parametrize("said", [{"full_attn_idxs": [1]}, {"full_attn_idxs": [0, 2]}, {}], ids=str)
def test_layers_that_are_numbered_are_those_with_attention(said: dict[str, Any]) -> None:
    config_class = type(AutoConfig.for_model("lfm2"))
    kinds = config_class(num_hidden_layers=3, **said).layer_types
    unlisted = {
        key: value for key, value in pico.config("lfm2").items() if key not in ("layer_types", "full_attn_idxs")
    }
    short_conv = from_hf_config(unlisted | said).short_conv
    assert short_conv and short_conv.layers == tuple(kind == "conv" for kind in kinds)


@pytest.mark.parametrize(
    ("family", "said", "error", "words"),
    [
        ("lfm2", {"conv_bias": True}, UnknownArchitecture, "conv_bias=True"),
        ("lfm2-moe", {"conv_bias": True}, UnknownArchitecture, "conv_bias=True"),
        ("lfm2-moe", {"norm_topk_prob": False}, UnknownArchitecture, "norm_topk_prob=False"),
        ("lfm2", {"block_use_swiglu": False}, UnknownArchitecture, "block_use_swiglu=False"),
        ("lfm2", {"layer_types": ["short_conv"] * 3}, UnknownArchitecture, "layers of type 'short_conv'"),
        ("lfm2", {"conv_dim": 128}, DamagedCheckpoint, "conv_dim is 128 and hidden_size, which is the same, 64"),
        ("lfm2", {"block_ffn_dim_multiplier": None}, DamagedCheckpoint, "block_ffn_dim_multiplier"),
        ("lfm2", {"conv_L_cache": 0}, DamagedCheckpoint, "^conv_L_cache is 0, not a size"),
        ("lfm2-moe", {"layer_types": None}, DamagedCheckpoint, "no `layer_types`"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(
    family: str, said: dict[str, Any], error: type[PrecisionctlError], words: str
) -> None:
    with pytest.raises(error, match=words):
        from_hf_config(pico.config(family, **said))


def test_texts_that_share_a_row_do_not_see_one_another(tmp_path: Path) -> None:
    assert_texts_are_apart("lfm2", tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("container", ["torch_dist", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_comes_back_from_any_division(tmp_path: Path, family: str, container: str) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16)
    sizes = Parallelism(2, 3, expert=2 if family == "lfm2-moe" else 1)
    assert_there_and_back(tmp_path / "hf", container=container, parallelism=sizes)


def test_ranks_share_the_channels_of_each_gate(tmp_path: Path) -> None:
    """The rows of a rank are not the first ones of in_proj, which are one gate's."""
    pico.save(tmp_path / "hf", "lfm2", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "m", "megatron", container="torch", parallelism=Parallelism(2))
    whole = load_file(tmp_path / "hf/model.safetensors")["model.layers.0.conv.in_proj.weight"]
    rank = torch.load(tmp_path / "m/release/mp_rank_00/model_optim_rng.pt", weights_only=False)["model"]
    mine = rank["decoder.layers.0.self_attention.in_proj.weight"]
    assert torch.equal(mine, torch.cat([part[:32] for part in whole.chunk(3)]))


def test_channels_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8}
    pico.save(tmp_path / "hf", "lfm2", dtype=torch.bfloat16, **sizes)
    with pytest.raises(ShapeMismatch, match=r"in_proj.weight.*cannot be cut into 3"):
        plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron", parallelism=Parallelism(3)))


def test_exports_leave_the_projections_around_convolutions_in_bf16(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "lfm2", dtype=torch.bfloat16)
    asked = Request.export(tmp_path / "hf", tmp_path / "out", "vllm", "dynamic", keep_misfits=True)
    plan = plan_command(asked).plan
    assert not [name for name in plan.codes if ".conv." in name]
    assert {name.split(".")[-2] for name in plan.codes} >= {"w1", "w2", "w3", "q_proj", "out_proj"}


def test_megatron_has_no_argument_for_them_and_says_so(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "lfm2", dtype=torch.bfloat16)
    notes = plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron")).notes
    assert any("short_conv used / not used" in note for note in notes)
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    assert open_checkpoint(tmp_path / "m").model.short_conv == from_hf_config(pico.config("lfm2")).short_conv
