"""Mistral Large 4's text model: its config.json key by key against transformers' class, and the names of tensors."""

from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_there_and_back, run
from gpt_models import assert_computes_as_transformers, assert_texts_are_apart
from safetensors.torch import load_file, save_file
from soaking import in_soak

from precisionctl.architectures.families import from_hf_config, table_of
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.param import Parallelism
from precisionctl.reports.inspect import describe, tables

FAMILY = "mistral-large-4"
pytestmark = pytest.mark.skipif(FAMILY in pico.ABSENT, reason="this transformers has no Mistral Large 4")


@pytest.mark.parametrize(
    "said",
    [
        {"kv_source_layers": None},
        {"kv_source_layers": [0, 1, 1, 3], "no_rope_layers": None},
        *in_soak(
            {"kv_source_layers": [0, 0, 0, 3], "no_rope_layers": [1, 1, 1, 0]},
            {"kv_source_layers": [0, 1, 2, 2], "no_rope_layers": [0, 0, 1, 1]},
            {"kv_source_layers": None, "no_rope_layers": [1, 1, 1, 1]},
            {"mlp_layer_types": None, "first_k_dense_replace": 2},
            {"indexer_types": None},
            {"indexer_types": ["full", "shared", "full", "shared"]},
            {"rope_parameters": None},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            {"rope_parameters": pico.YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.7}},
            {"routed_scaling_factor": 2.5, "n_shared_experts": 1},
            {"rms_norm_eps": 0.1},
        ),
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_to_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    assert_computes_as_transformers(pico.config(FAMILY, **said), tmp_path)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"n_group": 2}, "n_group=2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"q_lora_rank": 8}, "q_lora_rank=8"),
        ({"kv_source_layers": [0, 1, 0, 0]}, "layer 3 reads the latent of layer 0, and in transformers that of None"),
        ({"kv_source_layers": [0, 1, 1, 1]}, "layer 2 reads the latent of layer 1, and in transformers that of None"),
        (
            {"kv_source_layers": [0, 1, 0, 1], "no_rope_layers": [1, 1, 1, 1]},
            "layer 2 reads the latent of layer 0, and in transformers that of 1",
        ),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(said: dict[str, Any], words: str) -> None:
    with pytest.raises(UnknownArchitecture, match=words):
        from_hf_config(pico.config(FAMILY, **said))


@pytest.mark.parametrize("sources", [7, [0, 1], [0, 1, 0, "1"], [0, 1, 3, 3], [0, 1, -1, 1], [[], 1, 0, 1]], ids=str)
def test_sources_of_latents_that_are_none_are_refused(sources: Any) -> None:
    with pytest.raises((DamagedCheckpoint, UnknownArchitecture)):
        from_hf_config(pico.config(FAMILY) | {"kv_source_layers": sources})


def test_texts_that_share_a_row_count_their_positions_apart(tmp_path: Path) -> None:
    assert_texts_are_apart(FAMILY, tmp_path)


def test_names_in_memory_are_read_and_published_ones_written(tmp_path: Path) -> None:
    theirs = pico.make_and_save(tmp_path / "hf", FAMILY, dtype=torch.bfloat16)
    file = tmp_path / "hf/model.safetensors"
    stored, reader = load_file(file), open_checkpoint(tmp_path / "hf")
    assert "model.layers.3.experts.7.w3.weight" in stored and "model.lerope.alpha" in stored
    called = table_of(reader.model).in_memory(reader.specs, reader.model)
    assert {called.get(name, name) for name in stored if ".experts." not in name} == {
        name for name in theirs.state_dict() if ".experts." not in name
    }
    save_file({name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}, file, {"format": "pt"})
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    run(tmp_path / "m", tmp_path / "back", "hf")
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == stored.keys()
    assert [each for each in stored if not torch.equal(stored[each], back[each])] == []


def test_routers_norms_of_indexers_and_lerope_keep_their_dtype(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", FAMILY)
    run(tmp_path / "hf", tmp_path / "out", "hf", precision="bf16")
    wide = {name for name, tensor in load_file(tmp_path / "out/model.safetensors").items() if tensor.dtype.itemsize > 2}
    assert wide == {
        "model.lerope.alpha",
        *(f"model.layers.{layer}.gate.weight" for layer in (1, 2, 3)),
        *(
            f"model.layers.{layer}.attention.indexer.{norm}_norm.{part}"
            for layer in (0, 1)
            for norm in ("k", "q_input")
            for part in ("weight", "bias")
        ),
    }


def test_no_note_says_that_transformers_does_not_heed_the_epsilon_of_latents(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", FAMILY)
    notes = run(tmp_path / "hf", tmp_path / "out", "megatron").notes
    assert any("arguments cannot express" in note for note in notes)
    assert not any("latents of attention with epsilon" in note for note in notes)


def test_exports_leave_indexers_and_numbers_of_heads_as_they_are(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", FAMILY, dtype=torch.bfloat16, **pico.fp8_sizes(FAMILY))
    asked = Request.export(tmp_path / "hf", tmp_path / "out", "vllm", "dynamic", keep_misfits=True)
    codes = plan_command(asked).plan.codes
    assert {name.split(".")[-2] for name in codes} == {"wq", "wkv_a_with_mqa", "wkv_b", "wo", "w1", "w2", "w3"}


def test_inspect_says_how_many_layers_read_latents_of_others(tmp_path: Path) -> None:
    pico.save(tmp_path, FAMILY)
    rows = [cell for table in tables(describe(open_checkpoint(tmp_path))) for row in table.rows for cell in row]
    assert "4 heads of latents of 16; 2 layers read the latent of an earlier one" in rows


@pytest.mark.parametrize("container", ["torch_dist", *in_soak("torch")])
def test_a_checkpoint_comes_back_from_any_division(tmp_path: Path, container: str) -> None:
    pico.save(tmp_path / "hf", FAMILY, dtype=torch.bfloat16)
    assert_there_and_back(tmp_path / "hf", container=container, parallelism=Parallelism(2, 2, expert=2))
