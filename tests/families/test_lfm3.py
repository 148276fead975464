"""LFM3: its config.json key by key against transformers' class, and its gate's two names."""

from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_there_and_back, run
from gpt_models import assert_computes_as_transformers, assert_texts_are_apart
from safetensors.torch import load_file, save_file
from soaking import in_soak
from transformers import CONFIG_MAPPING

from precisionctl.architectures.families import from_hf_config
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, UnknownArchitecture
from precisionctl.param import Parallelism

pytestmark = pytest.mark.skipif("lfm3" in pico.ABSENT, reason="this transformers has no LFM3")

PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.3}
WHOLE = {"rope_type": "default", "rope_theta": 1e3}


@pytest.mark.soak
@pytest.mark.parametrize(
    "said",
    [
        {"rope_parameters": {"full_attention": WHOLE, "sliding_attention": WHOLE}},
        {"rope_parameters": {"full_attention": PROPORTIONAL, "sliding_attention": WHOLE}},
        {"rope_parameters": {"full_attention": pico.YARN_ROPE, "sliding_attention": WHOLE}},
        {"rope_parameters": None, "rope_theta": 5.0, "rope_scaling": None},
        *in_soak(
            {"rope_parameters": {"sliding_attention": WHOLE}, "layer_types": ["conv", *["sliding_attention"] * 4]},
            {"rope_parameters": {"full_attention": PROPORTIONAL}, "layer_types": ["full_attention", *["conv"] * 4]},
            {"layer_types": ["conv"] * 5},
            {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["conv"]},
            {"use_sandwich_norm": False},
            {"use_attention_gate": False},
            {"rms_norm_eps": 0.1, "norm_eps": 0.1},
            {"num_key_value_heads": 4, "conv_L_cache": 3},
            {"block_auto_adjust_ff_dim": True, "block_ff_dim": 48, "full_attn_idxs": [0], "tie_embedding": False},
        ),
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_to_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config("lfm3", **said), tmp_path)


def test_layers_that_no_list_names_are_those_of_the_class() -> None:
    kinds = CONFIG_MAPPING["lfm3"](num_hidden_layers=9).layer_types
    model = from_hf_config(pico.config("lfm3", num_hidden_layers=9, layer_types=None))
    assert [model.has_short_conv(layer) for layer in range(9)] == [kind == "conv" for kind in kinds]
    assert [model.in_window(layer) for layer in range(9)] == [kind == "sliding_attention" for kind in kinds]


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        ({"conv_bias": True}, UnknownArchitecture, "conv_bias=True"),
        ({"attention_bias": True}, UnknownArchitecture, "attention_bias=True"),
        ({"layer_types": ["linear_attention"] * 5}, UnknownArchitecture, "layers of type 'linear_attention'"),
        ({"layer_types": ["conv"]}, DamagedCheckpoint, "not a list of 5 layers"),
        ({"sliding_window": None}, DamagedCheckpoint, "no `sliding_window`"),
        ({"use_attention_gate": "no"}, DamagedCheckpoint, "use_attention_gate is 'no'"),
        ({"rms_norm_eps": 0.1}, DamagedCheckpoint, "rms_norm_eps is 0.1 and norm_eps"),
        ({"rope_parameters": WHOLE}, DamagedCheckpoint, "full_attention is without a `rope_theta`"),
        (
            {"rope_parameters": {"full_attention": WHOLE | {"partial_rotary_factor": 0.5}, "sliding_attention": WHOLE}},
            UnknownArchitecture,
            "partial_rotary_factor=0.5",
        ),
        (
            {"rope_parameters": {"full_attention": PROPORTIONAL, "sliding_attention": PROPORTIONAL}},
            UnknownArchitecture,
            "rotary scaling in layers with a window",
        ),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(
    said: dict[str, Any], error: type[PrecisionctlError], words: str
) -> None:
    with pytest.raises(error, match=words):
        from_hf_config(pico.config("lfm3", **said))


def test_the_gate_is_read_by_either_name_and_written_as_published(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "lfm3", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "hf/model.safetensors")
    assert {name.split(".")[-2] for name in stored if ".self_attn." in name} >= {"gate_proj"}
    in_memory = {name.replace(".self_attn.gate_proj.", ".self_attn.g_proj."): stored[name] for name in stored}
    pico.save(tmp_path / "other", "lfm3", dtype=torch.bfloat16)
    save_file(in_memory, tmp_path / "other/model.safetensors", {"format": "pt"})
    for name in ("hf", "other"):
        run(tmp_path / name, tmp_path / f"{name}-m", "megatron")
        run(tmp_path / f"{name}-m", tmp_path / f"{name}-back", "hf")
        back = load_file(tmp_path / f"{name}-back/model.safetensors")
        assert back.keys() == stored.keys()
        assert [each for each in stored if not torch.equal(stored[each], back[each])] == []


@pytest.mark.soak
@pytest.mark.parametrize("container", ["torch_dist", "torch"])
def test_a_checkpoint_comes_back_from_any_division(tmp_path: Path, container: str) -> None:
    pico.save(tmp_path / "hf", "lfm3", dtype=torch.bfloat16)
    assert_there_and_back(tmp_path / "hf", container=container, parallelism=Parallelism(2, 5))


@pytest.mark.soak
def test_texts_that_share_a_row_do_not_see_one_another(tmp_path: Path) -> None:
    assert_texts_are_apart("lfm3", tmp_path)


def test_exports_leave_gates_and_the_projections_around_convolutions_in_bf16(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "lfm3", dtype=torch.bfloat16)
    asked = Request.export(tmp_path / "hf", tmp_path / "out", "transformers", "dynamic", keep_misfits=True)
    plan = plan_command(asked).plan
    assert not [name for name in plan.codes if ".conv." in name or "gate_proj" in name]
    assert {name.split(".")[-2] for name in plan.codes} >= {"w1", "w2", "w3", "q_proj", "o_proj"}
