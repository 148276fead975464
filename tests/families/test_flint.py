"""Flint: its config.json key by key against transformers' class, both names of its sinks, and checkpoints of any
division."""

from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_same_tensors, assert_there_and_back, run
from gpt_models import assert_computes_as_transformers
from safetensors.torch import load_file, save_file
from soaking import in_soak

from precisionctl.architectures.families import from_hf_config
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.param import Parallelism

pytestmark = pytest.mark.skipif("flint" in pico.ABSENT, reason="this transformers has no Flint")


@pytest.mark.soak
@pytest.mark.parametrize(
    "said",
    [
        {"layer_types": ["full_attention"] * 5},
        {"layer_types": ["sliding_attention"] * 5},
        {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["sliding_attention"]},
        {"mlp_only_layers": []},
        *in_soak(
            {"mlp_only_layers": [4], "decoder_sparse_step": 2},
            {"norm_topk_prob": False},
            {"rope_parameters": pico.YARN_ROPE},
            {"tie_word_embeddings": True},
        ),
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_to_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config("flint", **said), tmp_path)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DamagedCheckpoint, {"sliding_window": None}),
        (DamagedCheckpoint, {"mlp_only_layers": "none"}),
        (UnknownArchitecture, {"hidden_act": "gelu"}),
        (UnknownArchitecture, {"layer_types": ["chunked_attention"] * 5}),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused_by_its_name(error: type[Exception], said: dict[str, Any]) -> None:
    with pytest.raises(error, match=next(iter(said))):
        from_hf_config(pico.config("flint", **said))


def test_sinks_have_two_names_and_stay_fp32_with_routers(tmp_path: Path) -> None:
    """As published, which transformers saves, and as in its class's memory."""
    pico.save(tmp_path / "hf", "flint", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    wide = {name for name in tensors if name.endswith((".softmax_offset", ".mlp.gate.weight"))}
    assert len(wide) == 5 + 3
    tensors |= {name: tensors[name].float() * 1.001 for name in wide}
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    run(tmp_path / "hf", tmp_path / "m", "megatron", precision="bf16")
    run(tmp_path / "m", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    in_memory = {name.replace(".softmax_offset", ".sinks"): tensor for name, tensor in tensors.items()}
    save_file(in_memory, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    run(tmp_path / "hf", tmp_path / "m2", "megatron")
    assert_same_tensors(tmp_path / "m", tmp_path / "m2")


# all kinds of rows in the other container: test_megatron_legacy.py
@pytest.mark.soak
@pytest.mark.parametrize("container", ["torch_dist", *in_soak("torch")])
def test_a_checkpoint_comes_back_from_any_division(tmp_path: Path, container: str) -> None:
    pico.save(tmp_path / "hf", "flint", dtype=torch.bfloat16)
    assert_there_and_back(tmp_path / "hf", container=container, parallelism=Parallelism(2, 2))
