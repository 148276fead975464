"""Falcon-H1: its config.json, names of Megatron-Bridge, and mixers of texts that share rows."""

import weakref
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_there_and_back, run
from gpt_models import assert_texts_are_apart
from transformers import AutoConfig

from precisionctl.architectures.families import from_hf_config
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, ShapeMismatch, UnknownArchitecture
from precisionctl.param import Parallelism
from precisionctl.precision import Precision
from precisionctl.trainer.model.gpt import GPT


def test_megatron_has_the_names_of_megatron_bridge(tmp_path: Path) -> None:
    """falconh1_bridge.py, mapping_registry; of convolutions, those that it calls legacy."""
    pico.save(tmp_path / "hf", "falcon-h1-norm", dtype=torch.bfloat16, num_hidden_layers=1)
    run(tmp_path / "hf", tmp_path / "m", "megatron", container="torch")
    mixer, layer = "decoder.layers.0.mamba_mixer.", "decoder.layers.0."
    assert {name for name in open_checkpoint(tmp_path / "m").specs if not name.endswith("_extra_state")} == {
        *("embedding.word_embeddings.weight", "decoder.final_norm.weight", "output_layer.weight"),
        *(f"{layer}norm.weight", f"{layer}mlp.linear_fc1.layer_norm_weight"),
        *(f"{layer}mlp.linear_fc1.weight", f"{layer}mlp.linear_fc2.weight"),
        *(f"{layer}self_attention.linear_qkv.weight", f"{layer}self_attention.linear_proj.weight"),
        *(mixer + name for name in ("A_log", "D", "dt_bias", "norm.weight", "in_proj.weight", "out_proj.weight")),
        *(mixer + name for name in ("conv1d.weight", "conv1d.bias")),
    }


def test_what_a_mixer_and_attention_read_and_give_is_gone_when_the_mlp_computes() -> None:
    model = GPT(pico.shape("falcon-h1-norm"), Precision(fp8=False))
    layer: Any = model.decoder.layers[0]
    made: list[weakref.ref[torch.Tensor]] = []
    left: list[bool] = []
    for part in (layer.norm, layer.mamba_mixer, layer.self_attention):
        part.register_forward_hook(
            lambda _, inputs, out: made.append(weakref.ref(out[0] if isinstance(out, tuple) else out))
        )
    layer.mlp.register_forward_pre_hook(lambda *_: left.extend(each() is not None for each in made))
    with torch.no_grad():
        model(torch.arange(8).view(1, 8))
    assert left == [False] * 3


@pytest.mark.soak
def test_texts_that_share_a_row_do_not_see_one_another(tmp_path: Path) -> None:
    assert_texts_are_apart("falcon-h1", tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("container", ["torch_dist", "torch"])
@pytest.mark.parametrize("family", ["falcon-h1", "falcon-h1-norm"])
def test_a_checkpoint_comes_back_from_any_division(tmp_path: Path, family: str, container: str) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16)
    assert_there_and_back(tmp_path / "hf", container=container, parallelism=Parallelism(2, 2))


def test_groups_of_heads_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "falcon-h1", dtype=torch.bfloat16, mamba_n_groups=1)
    with pytest.raises(ShapeMismatch, match=r"mamba_mixer.in_proj.weight.*cannot be cut into 2"):
        plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron", parallelism=Parallelism(2)))


def test_what_megatron_core_does_not_compute_is_said(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "falcon-h1", dtype=torch.bfloat16)
    notes = plan_command(Request(tmp_path / "hf", tmp_path / "m", "megatron")).notes
    (said,) = [note for note in notes if "computes another model" in note]
    assert "multipliers used / not used" in said and "mamba.gated_norm False / True" in said


@pytest.mark.parametrize(
    "said",
    [
        {"mamba_d_ssm": None, "mamba_expand": 2},
        {"mamba_d_ssm": None, "mamba_expand": 3, "mamba_n_heads": 16, "mamba_d_head": 12},
        {"mamba_d_head": "auto"},
    ],
    ids=str,
)
def test_heads_of_a_mixer_are_those_that_transformers_makes(said: dict[str, Any]) -> None:
    theirs = type(AutoConfig.for_model("falcon_h1")).from_dict(pico.config("falcon-h1", mamba_d_head="auto") | said)
    mamba = from_hf_config(pico.config("falcon-h1", mamba_d_head="auto") | said).mamba
    assert mamba and (mamba.num_heads, mamba.head_dim) == (theirs.mamba_n_heads, theirs.mamba_d_head)


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        *(
            ({key: True}, UnknownArchitecture, f"{key}=True")
            for key in ("mamba_proj_bias", "projectors_bias", "attention_bias", "mlp_bias")
        ),
        ({"mamba_conv_bias": False}, UnknownArchitecture, "mamba_conv_bias=False"),
        ({"mamba_d_conv": 3}, UnknownArchitecture, "mamba_d_conv=3"),
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": True}, UnknownArchitecture, "mamba_norm_before_gate=True"),
        ({"time_step_limit": [0.0, 0.1]}, UnknownArchitecture, "time_step_limit"),
        ({"attn_layer_indices": [0]}, UnknownArchitecture, "attn_layer_indices"),
        ({"mamba_n_heads": 16}, DamagedCheckpoint, "16 heads of 4 channels in a mixer, which mamba_d_ssm says has 128"),
        ({"mamba_d_ssm": "x", "mamba_d_head": "auto"}, DamagedCheckpoint, "mamba_d_ssm is 'x', not a size"),
        ({"ssm_multipliers": [1.0] * 4}, DamagedCheckpoint, "ssm_multipliers is .*, not 5 numbers"),
        ({"mlp_multipliers": "x"}, DamagedCheckpoint, "mlp_multipliers is 'x', not 2 numbers"),
        ({"key_multiplier": "x"}, DamagedCheckpoint, "key_multiplier is 'x'"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(
    said: dict[str, Any], error: type[PrecisionctlError], words: str
) -> None:
    with pytest.raises(error, match=words):
        from_hf_config(pico.config("falcon-h1", **said))
