"""What metadata say of single families, and what is refused of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import gguf_tokenizers
import gguf_towers
import pico
import pytest
import tiny_wrappers
import torch
from nemotron_nas import block
from safetensors.torch import load_file

from precisionctl.architectures.families import from_hf_config
from precisionctl.checkpoints.base import Hints
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.gguf.families import of_llama_cpp
from precisionctl.checkpoints.gguf.head import read_head
from precisionctl.checkpoints.hf_directory.companions import read_companions
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import LLAMA_CPP, Request
from precisionctl.errors import UnknownArchitecture
from precisionctl.export.gguf.gguf_pretokenizers import QWEN2


@pytest.mark.parametrize("family", ["stablelm", "phi"])
def test_the_base_of_rotary_embeddings_is_said_where_llama_cpp_would_take_another(family: str) -> None:
    changes = gguf_files.WRITTEN[family]
    usual = gguf_files.metadata(from_hf_config(pico.config(family, **changes)))
    parameters = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    other = gguf_files.metadata(from_hf_config(pico.config(family, **changes | {"rope_parameters": parameters})))
    key = next(iter(other.keys() - usual.keys()))
    assert key.endswith(".rope.freq_base") and other[key] == 1e6


def test_text_models_of_glms_of_images_have_rotary_pairs_in_halves_and_say_how_images_turn(tmp_path: Path) -> None:
    published = gguf_towers.save(tmp_path / "hf", "glm4v")
    file = gguf_files.export(published, tmp_path / "out")
    stored, made = tiny_wrappers.stored(published), gguf_files.stored_tensors(file)
    for end, dtype in (("weight", torch.bfloat16), ("bias", torch.float32)):
        query = stored[f"model.language_model.layers.1.self_attn.q_proj.{end}"].to(dtype)
        found = torch.frombuffer(bytearray(made[f"blk.1.attn_q.{end}"][1]), dtype=dtype).view(query.shape)
        for head, pair in ((0, 0), (1, 5), (1, 31)):  # of heads of 128 rows of which 64 turn
            row = 128 * head
            assert torch.equal(found[[row + pair, row + pair + 32]], query[row + 2 * pair : row + 2 * pair + 2])
            assert torch.equal(found[row + 64 : row + 128], query[row + 64 : row + 128])
    assert read_head(file).metadata["glm4.rope.dimension_sections"] == [8, 12, 12, 0]
    for name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        read = read_tensor(open_checkpoint(file), f"model.layers.0.{name}")
        assert torch.equal(read, stored[f"model.language_model.layers.0.{name}"])


def queries_then_keys_then_values(rows: torch.Tensor) -> torch.Tensor:
    """Of two groups, of two heads of 16 queries each, the rows of one kind after those of another."""
    heads = [rows[start : start + 16] for start in range(0, len(rows), 16)]
    return torch.cat([heads[each] for each in (0, 1, 4, 5, 2, 6, 3, 7)])


@pytest.mark.parametrize(
    ("family", "name", "change"),
    [
        ("falcon-40b", "transformer.h.1.self_attention.query_key_value.weight", queries_then_keys_then_values),
        ("gpt2", "transformer.h.1.attn.c_attn.weight", torch.t),
    ],
)
def test_queries_keys_and_values_in_one_tensor_stand_in_llama_cpps_order(
    tmp_path: Path, family: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    published = gguf_files.source(tmp_path / "hf", family, **gguf_files.WRITTEN[family])
    file = gguf_files.export(published, tmp_path / "out")
    stored = load_file(published / "model.safetensors")
    expected = change(stored[name])
    made = gguf_files.stored_tensors(file)["blk.1.attn_qkv.weight"][1]
    assert torch.equal(torch.frombuffer(bytearray(made), dtype=torch.bfloat16).view(expected.shape), expected)
    reader = open_checkpoint(file)
    assert reader.specs.keys() == stored.keys()
    for each, values in stored.items():
        assert torch.equal(read_tensor(reader, each).bfloat16(), values), each


def test_a_note_says_where_llama_cpp_approximates_gelu(tmp_path: Path) -> None:
    for family, noted in (("gpt-neox", True), ("gpt2", False)):
        published = gguf_files.source(tmp_path / family, family)
        notes = plan_command(Request.export(published, tmp_path / "out", LLAMA_CPP)).notes
        assert any("GELU" in note for note in notes) is noted


def test_experts_that_a_trainer_saved_as_in_memory_make_the_same_file(tmp_path: Path) -> None:
    changes, files = gguf_files.WRAPPED["qwen3_vl_moe"], []
    for kind in ("published", "memory"):
        folder = tmp_path / kind
        in_memory, sizes = kind == "memory", {"vocab_size": gguf_tokenizers.SIZE, "dtype": torch.bfloat16}
        tiny_wrappers.save(folder, "qwen3_vl_moe", in_memory=in_memory, **sizes, **changes)
        gguf_tokenizers.byte_level(QWEN2).save_pretrained(folder)
        files.append(gguf_files.export(folder, tmp_path / f"of-{kind}" / "out"))
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_jamba_without_experts_says_that_there_is_one(tmp_path: Path) -> None:
    published = gguf_files.source(tmp_path / "hf", "jamba", num_experts=1)
    file = gguf_files.export(published, tmp_path / "out")
    assert read_head(file).metadata["jamba.expert_count"] == 1
    hints = Hints(companions=read_companions(published), reference=published)
    assert open_checkpoint(file, None, hints).model == open_checkpoint(published).model
    assert open_checkpoint(file).model.moe is None


@pytest.mark.parametrize("shared", [0, 48])
def test_a_granite_with_a_shared_expert_is_read_as_one(tmp_path: Path, shared: int) -> None:
    published = gguf_files.source(tmp_path / "hf", "granite-moe-shared", shared_intermediate_size=shared)
    found = open_checkpoint(gguf_files.export(published, tmp_path / "out")).model
    assert found.architecture == ("granitemoeshared" if shared else "granitemoe")
    assert found.moe and found.moe.shared_ffn_hidden_size == (shared or None)


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("cohere2-moe", {"shared_expert_combination_strategy": "sum"}, "shared_average"),
        ("cohere2-moe", {"sliding_window": None, "layer_types": ["full_attention"] * 5}, "rope_layers"),
        ("cohere2-moe", {"prefix_dense_sliding_window_pattern": 2, "first_k_dense_replace": 2}, "rope_layers"),
        ("arcee", {"mlp_bias": True}, "mlp_bias"),
        ("exaone-moe", {"sliding_window": None, "layer_types": ["full_attention"] * 4}, "without a window"),
        ("jamba", {"mamba_expand": 4}, "256 channels"),
        ("phi", {"hidden_act": "gelu"}, "activation"),
        ("stablelm", {"tie_word_embeddings": True}, "tied_embeddings"),
        ("dots1", {"num_key_value_heads": 2}, "num_query_groups"),
        ("falcon-40b", {"bias": True}, "proj_bias|qkv_bias"),
        ("nemotron", {"tie_word_embeddings": True}, "tied_embeddings"),
        ("mellum", {"mlp_layer_types": ["dense", "sparse", "sparse"]}, "moe.layer_freq"),
        ("mellum", {"rope_parameters": pico.FAMILIES["mellum"]["rope_parameters"]}, "rotary_base_local"),
        ("granite-swa", {"layer_rope_theta": [5e5, 1e4, 1e4, 1e4, 5e5, 1e4]}, "rotary_base_local"),
        ("minicpm3", {"scale_emb": 10}, "embedding_multiplier"),
        ("minicpm3", {"q_lora_rank": None}, "in one step"),
        ("minicpm3", {"max_position_embeddings": 1024}, "same context"),
        ("youtu", {"q_lora_rank": None}, "in one step"),
        ("nemotron-nas", {"block_configs": [block(None, 9.0), *[block(1, 9.0)] * 3]}, "without attention in the first"),
        ("nemotron-nas", {"block_configs": [block(1, 9.0), block(1, None), *[block(1, 9.0)] * 2]}, "and no MLP in a"),
        ("nemotron-nas", {"block_configs": [*[block(1, 9.0)] * 3, block(None, None)]}, "no MLP in the last"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(family: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UnknownArchitecture, match=why):
        of_llama_cpp(from_hf_config(pico.config(family, **gguf_files.WRITTEN[family] | changes)))
