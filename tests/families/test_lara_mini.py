"""Lara 4 Mini: its config.json key by key against transformers' class, both spellings of its delta nets, checkpoints of
any division, and what engines get."""

from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_same_tensors, assert_there_and_back, carry_out, run
from gpt_models import assert_computes_as_transformers
from safetensors.torch import load_file, save_file
from soaking import in_soak
from transformers import AutoModelForCausalLM

from precisionctl.architectures.families import from_hf_config
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.request import Request
from precisionctl.engines.base import engine_named
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.param import Parallelism
from precisionctl.verify.engine_rules import check

pytestmark = pytest.mark.skipif("lara-mini" in pico.ABSENT, reason="this transformers has no Lara")


@pytest.mark.soak
@pytest.mark.parametrize(
    "said",
    [
        {"layer_types": None, "num_hidden_layers": 7},
        {"layer_types": ["sliding_attention"] * 5},
        {"layer_types": ["full_attention"] * 5},
        {"layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"]},
        *in_soak({"norm_topk_prob": False}, {"tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_to_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config("lara-mini", **said), tmp_path)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DamagedCheckpoint, {"sliding_window": None}),
        (DamagedCheckpoint, {"layer_types": ["linear_attention"]}),
        (UnknownArchitecture, {"layer_types": ["conv"] * 5}),
        (UnknownArchitecture, {"hidden_act": "gelu"}),
        (UnknownArchitecture, {"partial_rotary_factor": 0.5, "rope_parameters": None}),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused_by_its_name(error: type[Exception], said: dict[str, Any]) -> None:
    with pytest.raises(error, match=next(iter(said))):
        from_hf_config(pico.config("lara-mini", **said))


def test_a_delta_net_is_one_projection_in_files_and_four_in_memory(tmp_path: Path) -> None:
    model = pico.make_and_save(tmp_path / "hf", "lara-mini", dtype=torch.bfloat16)
    names = load_file(tmp_path / "hf" / "model.safetensors").keys()
    assert {f"model.layers.0.linear_attn.{name}.weight" for name in ("in_proj", "out_norm")} < names
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    run(tmp_path / "m", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    in_memory = dict(model.state_dict())
    assert "model.layers.0.linear_attn.in_proj_qkv.weight" in in_memory
    save_file(in_memory, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    run(tmp_path / "hf", tmp_path / "m2", "megatron")
    assert_same_tensors(tmp_path / "m", tmp_path / "m2")


def test_a_checkpoint_comes_back_from_any_division(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "lara-mini", dtype=torch.bfloat16)
    assert_there_and_back(tmp_path / "hf", parallelism=Parallelism(2, 1, expert=2))


WHOLE = {"hidden_size": 128, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "head_dim": 64}


@pytest.mark.parametrize("scheme", ["dynamic", *in_soak("w4a16")])
def test_transformers_loads_what_is_exported_for_it(tmp_path: Path, scheme: Any) -> None:
    """With experts as one tensor, and the projection that it divides, as values."""
    source = pico.make_and_save(tmp_path / "hf", "lara-mini", dtype=torch.bfloat16, **WHOLE)
    carry_out(Request.export(tmp_path / "hf", tmp_path / "out", "transformers", scheme))
    loaded, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    tokens = torch.arange(24).view(2, 12) * 7 % 250
    with torch.no_grad():
        expected, here = source(tokens).logits.float(), loaded(tokens).logits.float()
    assert (expected - here).norm() < 0.3 * expected.norm()


def test_experts_one_by_one_are_not_for_transformers(tmp_path: Path) -> None:
    """Which looks for them as one tensor, and makes new ones."""
    pico.save(tmp_path / "hf", "lara-mini", dtype=torch.bfloat16, **WHOLE)
    carry_out(Request.export(tmp_path / "hf", tmp_path / "out", "vllm", "dynamic"))
    findings = check(open_checkpoint(tmp_path / "out"), engine_named("transformers"))
    assert any(".experts.0." in each.where and each.rule.fatal for each in findings)
