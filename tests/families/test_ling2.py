"""Ling 2.0, judged by a plain model of its public sources (ling2.py): a published config.json, names, divisions,
layers of prediction, and directories for engines, which have classes of it."""

import json
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_same_tensors, assert_there_and_back, carry_out, run
from gpt_models import assert_computes_as_transformers
from prediction_layer import add_mtp
from safetensors.torch import load_file
from soaking import in_soak

from precisionctl.architectures.families import architecture_of, from_hf_config, to_hf_config
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.request import Request
from precisionctl.engines.base import engine_named
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.param import Parallelism
from precisionctl.verify.engine_rules import check

MINI: dict[str, Any] = {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "max_position_embeddings": 32768,
    "model_type": "bailing_moe",
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "n_group": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 600000,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "vocab_size": 157184,
}
"""Ling-mini-2.0's, from memory, without keys that no number depends on."""


def test_a_published_config_describes_what_it_is_written_as_and_16_billion_parameters() -> None:
    model = from_hf_config(MINI)
    rows = [row for row in architecture_of(model.architecture).spelled({}, model) if not row.of_prediction]
    sizes = (
        row.count(model) * torch.Size(row.shape(model)).numel() for row in rows if row.present.in_layout("hf", model)
    )
    assert round(sum(sizes) / 1e9) == 16  # as its README says
    written = to_hf_config(model, "bfloat16")
    assert {key: written.get(key) for key in MINI} == MINI
    later = MINI | {"model_type": "bailing_moe_v2"}
    assert to_hf_config(from_hf_config(later), "bfloat16")["model_type"] == "bailing_moe_v2"


@pytest.mark.parametrize(
    "said",
    [
        {"use_qk_norm": False, "use_qkv_bias": True, "num_shared_experts": 2},
        *in_soak({"n_group": 1, "topk_group": 1, "partial_rotary_factor": 1.0}, {"tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_in_published_code(said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config("ling-2", **said), tmp_path)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UnknownArchitecture, {"use_bias": True}),
        (UnknownArchitecture, {"score_function": "softmax"}),
        (UnknownArchitecture, {"moe_router_enable_expert_bias": False}),
        (UnknownArchitecture, {"norm_topk_prob": False}),
        (DamagedCheckpoint, {"moe_shared_expert_intermediate_size": 64}),
        (UnknownArchitecture, {"architectures": ["BailingMoeForCausalLM"]}),  # Ling 1
        (UnknownArchitecture, {"architectures": None}),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused_by_its_name(error: type[Exception], said: dict[str, Any]) -> None:
    with pytest.raises(error, match=next(iter(said))):
        from_hf_config(MINI | said)


@pytest.mark.parametrize("parallelism", [Parallelism(2, 1, expert=2), *in_soak(Parallelism(1, 3))], ids=str)
def test_a_checkpoint_comes_back_from_any_division(parallelism: Parallelism, tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "ling-2", dtype=torch.bfloat16)
    names = load_file(tmp_path / "hf" / "model.safetensors").keys()
    assert {"model.layers.0.attention.query_key_value.weight", "model.layers.1.mlp.gate.expert_bias"} < names
    assert_there_and_back(tmp_path / "hf", parallelism=parallelism)


def test_layers_of_prediction_have_the_names_of_megatron_bridge_and_come_back(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "ling-2", dtype=torch.bfloat16)
    added = add_mtp(tmp_path / "hf", torch.bfloat16)
    last = "model.layers.3."
    assert {f"{last}{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm", "attention.dense")} < {
        *added
    }
    run(tmp_path / "hf", tmp_path / "m", "megatron", parallelism=Parallelism(2))
    there = {name for name in open_checkpoint(tmp_path / "m").specs if name.startswith("mtp.")}
    for name in ("eh_proj", "final_layernorm", "transformer_layer.self_attention.linear_proj"):
        assert f"mtp.layers.0.{name}.weight" in there
    run(tmp_path / "m", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


@pytest.mark.parametrize("engine", ["vllm", *in_soak("sglang")])
def test_engines_get_their_class(tmp_path: Path, engine: Any) -> None:
    whole = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    pico.save(tmp_path / "hf", "ling-2", dtype=torch.bfloat16, **whole)
    carry_out(Request.export(tmp_path / "hf", tmp_path / "out", engine, "dynamic"))
    out = json.loads((tmp_path / "out" / "config.json").read_text())
    assert from_hf_config(out) == from_hf_config(json.loads((tmp_path / "hf" / "config.json").read_text()))
    assert out["architectures"] == ["BailingMoeV2ForCausalLM"]
    findings = check(open_checkpoint(tmp_path / "out"), engine_named(engine))
    assert [each.where for each in findings if each.rule.fatal] == []
