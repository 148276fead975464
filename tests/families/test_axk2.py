"""A.X K2: its config.json key by key against transformers' class, and the names of what it alone has."""

from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_there_and_back, run
from gpt_models import assert_computes_as_transformers
from safetensors.torch import load_file, save_file
from soaking import in_soak

from precisionctl.architectures.families import from_hf_config
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.errors import UnknownArchitecture
from precisionctl.param import Parallelism

pytestmark = pytest.mark.skipif("axk2" in pico.ABSENT, reason="this transformers has no A.X K2")


@pytest.mark.soak
@pytest.mark.parametrize(
    "said",
    [
        {"mlp_layer_types": None},
        {"mlp_layer_types": None, "first_k_dense_replace": 0},
        {"mlp_layer_types": ["sparse", "dense", "sparse"], "first_k_dense_replace": 3},
        {"n_group": 4, "topk_group": 2},
        *in_soak(
            {"n_group": 1, "topk_group": 1},
            {"head_dim": 5},
            {"gated_norm_rank": 3},
            {"index_n_heads": 1, "index_head_dim": 8},
            {"routed_scaling_factor": 1.0, "n_shared_experts": 1},
            {"rope_parameters": pico.YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.7}},
            {"rope_interleave": False},
        ),
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_to_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config("axk2", **said), tmp_path)


def test_all_layers_are_of_one_kind_by_either_of_its_names() -> None:
    """The second is that of transformers 5.17."""
    found = [
        from_hf_config(pico.config("axk2", layer_types=[kind] * 3))
        for kind in ("indexed_attention", "deepseek_sparse_attention")
    ]
    assert found[0] == found[1] and found[0].dsa and all(found[0].dsa.layers)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"layer_types": ["full_attention"] * 3}, "layers of type 'full_attention'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(said: dict[str, Any], words: str) -> None:
    with pytest.raises(UnknownArchitecture, match=words):
        from_hf_config(pico.config("axk2", **said))


def test_names_in_memory_are_read_and_published_ones_written(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "axk2", dtype=torch.bfloat16)
    file = tmp_path / "hf/model.safetensors"
    stored = load_file(file)
    assert {name.split(".")[-2] for name in stored} >= {"W_down", "W_up", "q_b_proj"}
    renamed = {".W_down.": ".mlp.fc1.", ".W_up.": ".mlp.fc2.", ".q_b_proj.": ".q_gate_proj."}
    in_memory = {}
    for name, tensor in stored.items():
        for published, other in renamed.items():
            name = name.replace(published, other)
        in_memory[name] = tensor
    save_file(in_memory, file, {"format": "pt"})
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    run(tmp_path / "m", tmp_path / "back", "hf")
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == stored.keys()
    assert [each for each in stored if not torch.equal(stored[each], back[each])] == []


def test_exports_leave_gates_of_norms_and_indexers_in_bf16(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "axk2", dtype=torch.bfloat16, **pico.fp8_sizes("axk2"))
    asked = Request.export(tmp_path / "hf", tmp_path / "out", "transformers", "dynamic", keep_misfits=True)
    codes = plan_command(asked).plan.codes
    assert not [name for name in codes if "layernorm" in name or "indexer" in name]
    assert {name.split(".")[-2] for name in codes} >= {"q_a_proj", "q_b_proj", "kv_b_proj", "o_proj", "down_proj"}


@pytest.mark.soak
@pytest.mark.parametrize("container", ["torch_dist", "torch"])
@pytest.mark.parametrize("family", ["axk1", "axk2"])
def test_a_checkpoint_comes_back_from_any_division(tmp_path: Path, family: str, container: str) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16)
    assert_there_and_back(tmp_path / "hf", container=container, parallelism=Parallelism(2, 3, expert=2))
