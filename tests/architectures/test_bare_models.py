"""Models as AutoModel saves them, such as Qwen3-Embedding: a family's layers, without `model.` and without an output
layer."""

import json
from pathlib import Path

import conversions
import pico
import pytest
import torch
import torch.distributed.checkpoint
from any_models import export
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemWriter
from transformers import AutoModel, AutoModelForCausalLM

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import UnknownArchitecture, UnmappedTensor


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """As Qwen3-Embedding is published: its config.json names the class of the language model."""
    config = pico.make("qwen3").config
    AutoModel.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "bare")
    said = json.loads((tmp_path / "bare" / "config.json").read_text())
    (tmp_path / "bare" / "config.json").write_text(json.dumps(said | {"architectures": ["Qwen3ForCausalLM"]}))
    return tmp_path / "bare"


def test_transformers_has_the_weights_of_an_export_that_we_decode(tmp_path: Path, bare: Path) -> None:
    export(bare, tmp_path / "fp8", "dynamic", "vllm", exclude=("layers.1.mlp.down_proj",))
    conversions.run(tmp_path / "fp8", tmp_path / "back", "hf", "bf16")
    coded, decoded = (
        AutoModel.from_pretrained(tmp_path / name, dtype=torch.float32).state_dict()  # in BF16 it rounds scales, too
        for name in ("fp8", "back")
    )
    scales = {name: coded.pop(f"{name}_scale") for name in decoded if f"{name}_scale" in coded}
    coded |= {name: (coded[name].float() * scale).bfloat16().float() for name, scale in scales.items()}
    assert len(scales) == 13 and coded.keys() == decoded.keys()
    assert all(torch.equal(coded[name], values) for name, values in decoded.items())


def test_what_stays_values_is_listed_by_the_names_that_engines_give_it(tmp_path: Path, bare: Path) -> None:
    export(bare, tmp_path / "fp8", "dynamic", "vllm", exclude=("layers.1.mlp.down_proj",))
    listed = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["ignore"]
    of_engines = {name for name, _ in AutoModelForCausalLM.from_config(pico.make("qwen3").config).named_modules()}
    assert {"layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj"} <= set(listed)
    assert "model.layers.1.mlp.down_proj" in of_engines


def test_what_needs_a_table_is_refused_with_what_is_missing(tmp_path: Path, bare: Path) -> None:
    with pytest.raises(UnknownArchitecture, match=r"lack `model\.`.*AutoModelForCausalLM if its embeddings are tied"):
        conversions.run(bare, tmp_path / "out", "megatron")


@pytest.mark.parametrize("family", ["falcon", "gpt-neox", "mamba2"])
def test_a_class_may_call_what_is_within_otherwise(tmp_path: Path, family: str) -> None:
    model = AutoModel.from_config(pico.make(family).config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "bare")
    conversions.run(tmp_path / "bare", tmp_path / "out", "hf", "fp32")
    found = AutoModel.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], values.float()) for name, values in model.state_dict().items())
    within = open_checkpoint(tmp_path / "bare").model.within  # type: ignore[attr-defined]
    assert within == f"{model.base_model_prefix}."


def test_a_stray_embedding_makes_no_bare_model_of_a_whole_one(tmp_path: Path) -> None:
    pico.save(tmp_path, "qwen3", dtype=torch.bfloat16)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"embed_tokens.weight": torch.ones(4, 4)}, path)
    with pytest.raises(UnmappedTensor, match=r"embed_tokens\.weight"):
        conversions.run(tmp_path, tmp_path / "out", "hf")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_names_of_a_bare_model_in_dcp_are_its_own(tmp_path: Path, bare: Path) -> None:
    """They begin with `model.` as those of a whole model with tied embeddings do: PyTorch's index says that here it is
    the key of a dict around them."""
    state = AutoModel.from_pretrained(bare).state_dict()
    writer = FileSystemWriter(tmp_path / "theirs")
    torch.distributed.checkpoint.save({"model": state}, storage_writer=writer, no_dist=True)
    (tmp_path / "theirs" / "config.json").write_bytes((bare / "config.json").read_bytes())
    conversions.run(bare, tmp_path / "ours", "hf", container="dcp")
    for name in ("ours", "theirs"):
        assert set(open_checkpoint(tmp_path / name).specs) == state.keys()
        conversions.run(tmp_path / name, tmp_path / f"{name}-back", "hf")
        conversions.assert_same_tensors(bare, tmp_path / f"{name}-back")


def test_tied_embeddings_are_mended_as_the_message_says(tmp_path: Path) -> None:
    AutoModel.from_config(pico.make("llama-tied").config).save_pretrained(tmp_path / "bare")
    AutoModelForCausalLM.from_pretrained(tmp_path / "bare").save_pretrained(tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").model.tied_embeddings
