"""Qwen4-Exp: its config.json key by key against transformers' class, its tables of n-grams in memory and in pieces, and
the numbers of the published model (Qwen3.8-Flash-Next)."""

import json
import math
from pathlib import Path
from typing import Any

import fp8_directories
import numpy as np
import pico
import pytest
import tiny_wrappers
import torch
from conversions import assert_same_tensors, assert_there_and_back, run
from gpt_models import (
    as_gpt,
    assert_computes_as_transformers,
    assert_texts_are_apart,
    both_gradients,
    clear_tokens,
    converted,
)
from safetensors.torch import load_file, save_file
from soaking import first, in_soak

from precisionctl.architectures import param_map
from precisionctl.architectures.families import from_hf_config, table_of
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.engines.base import engine_named
from precisionctl.errors import DamagedCheckpoint, RecipeError, ShapeMismatch, UnknownArchitecture
from precisionctl.evaluate import load as load_stored
from precisionctl.param import Parallelism
from precisionctl.planning.segments import Segment, lower
from precisionctl.recipe import ParallelSettings
from precisionctl.trainer.parallel.shards import check
from precisionctl.verify.engine_rules import check as check_engine

pytestmark = pytest.mark.skipif("qwen4" in pico.ABSENT, reason="this transformers has no Qwen4-Exp")


@pytest.mark.parametrize(
    "said",
    [
        {"ple_layer_ids": []},
        {"ngram_size": 4, "ple_embed_dim": 48, "eos_token_id": [7, 2]},
        *in_soak(
            {"ple_layer_ids": [3], "ple_embed_dim": None, "ple_conv_kernel_size": 2},
            {"ngram_size": 2, "heads_per_ngram": 1, "ngram_vocab_size_base": 1, "split_ngram_parts": 7},
            {"hc_count": 3, "hc_lowrank": 5, "output_gate_type": None, "norm_topk_prob": False},
            {"indexer_n_heads": 8, "indexer_compress_ratio": 2, "indexer_budget": 8},
            {"indexer_n_heads": 8, "indexer_compress_ratio": 1, "indexer_budget": 5},
            {"layer_types": None, "full_attention_interval": 2},
            {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
            {"layer_types": ["linear_attention"] * 3, "indexer_n_heads": None},
            {"tie_word_embeddings": True, "seed": 5},
        ),
    ],
    ids=str,
)
def test_a_setting_means_what_it_means_to_transformers(said: dict[str, Any], tmp_path: Path) -> None:
    config = pico.config("qwen4", initializer_range=0.12, **said)
    if said.get("indexer_n_heads", 1) is None:
        config |= {key: None for key in config if key.startswith("indexer_")}
    assert_computes_as_transformers(config, tmp_path)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UnknownArchitecture, {"layer_types": ["linear_attention", "sliding_attention", "linear_attention"]}),
        (UnknownArchitecture, {"output_gate_type": "gelu"}),
        (UnknownArchitecture, {"indexer_kv_heads": 2}),
        (UnknownArchitecture, {"hidden_act": "gelu"}),
        (DamagedCheckpoint, {"indexer_n_heads": None}),
        (DamagedCheckpoint, {"indexer_budget": 7}),
        (DamagedCheckpoint, {"ple_layer_ids": [2]}),
        (DamagedCheckpoint, {"ple_layer_ids": [0, 1]}),
        (DamagedCheckpoint, {"ple_layer_ids": [4]}),
        (DamagedCheckpoint, {"ple_layer_ids": "1"}),
        (DamagedCheckpoint, {"eos_token_id": None}),
        (DamagedCheckpoint, {"eos_token_id": []}),
        (DamagedCheckpoint, {"ngram_size": 1}),
        (DamagedCheckpoint, {"split_ngram_parts": 1 << 20}),
        (DamagedCheckpoint, {"heads_per_ngram": 1 << 9}),
        (DamagedCheckpoint, {"hc_lowrank": 0}),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused_by_its_key(error: type[Exception], said: dict[str, Any]) -> None:
    ((key, value),) = said.items()
    with pytest.raises(error, match=key if value not in (1 << 20, 1 << 9) else "n-gram embeddings is"):
        from_hf_config(pico.config("qwen4") | said)


def test_gradients_are_transformers(tmp_path: Path) -> None:
    theirs = pico.make("qwen4", initializer_range=0.12)
    ours = as_gpt(converted(theirs, tmp_path))
    tokens = clear_tokens(ours, (3, 40))
    for logits in (theirs(tokens).logits, ours(tokens)[..., : pico.SIZES["vocab_size"]]):
        logits.logsumexp(-1).sum().backward()
    for name, found, expected in both_gradients(theirs, ours):
        # the root in gates of n-grams magnifies rounding where what it is of is next to nothing
        atol = (5e-5 if ".ple." in name else 2e-5) * float(expected.abs().max())  # 1.03e-5 was seen of a CPU
        torch.testing.assert_close(found, expected, rtol=0, atol=atol, msg=lambda said, name=name: f"{name}: {said}")


def test_texts_that_share_a_row_do_not_see_each_other(tmp_path: Path) -> None:
    """Of more tokens than those of which an indexer chooses all keys."""
    assert_texts_are_apart("qwen4", tmp_path, (15, 8, 17))


PUBLISHED = {
    "model_type": "qwen4_exp_text",
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "eos_token_id": 248044,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "full_attention_interval": 4,
    "output_gate_type": "sigmoid",
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "hc_count": 4,
    "hc_lowrank": 320,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "split_ngram_parts": 128,
    "make_ngram_vocab_size_divisible_by": 128,
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e7,
}
"""The text model of Qwen3.8-Flash-Next."""


def test_the_published_model_has_the_sizes_that_llama_cpp_and_sglang_found() -> None:
    """In llama.cpp's files: 176.9 billion parameters without the prediction layer, of which a table has 320,001,536
    rows of 160 numbers (`per_layer_token_embd`); these are 51,200,245,760 bytes in FP8 (SGLang's issue 37792)."""
    model = from_hf_config(PUBLISHED)
    rows = [row for row in table_of(model).spelled({}, model) if row.count(model)]
    sizes = {row.megatron: row.count(model) * math.prod(row.shape(model)) for row in rows}
    assert round(sum(sizes.values()) / 1e8) == 1769
    assert sizes["decoder.layers.{layer}.ple.ple_embedding.ngram_embedding.weight"] == 51_200_245_760
    assert model.ple and (model.ple.table_rows(1), model.ple.head_dim) == (320_001_536, 160)
    assert model.rotary_size == 64 and model.msa and model.msa.dense_length == 2051  # kekzl/imp, pull request 2057


def test_a_table_larger_than_its_row_numbers_could_be_is_moved_in_whole_parts() -> None:
    """By no array of numbers, which would take gigabytes."""
    model = from_hf_config(PUBLISHED)
    (row,) = (row for row in table_of(model).spelled({}, model) if row.megatron.endswith("ngram_embedding.weight"))
    shapes = row.shapes(model, "hf")
    assert shapes == ((2_500_012, 160),) * 128
    reads = {name: rows for name, (rows, _) in zip(row.hf, shapes, strict=True)}
    there = lower(row, model, "hf", "megatron", reads, [row.megatron])
    assert there[1] == Segment(row.hf[1], 0, row.megatron, 2_500_012, 2_500_012) and len(there) == 128
    back = lower(row, model, "megatron", "hf", {row.megatron: 320_001_536}, list(row.hf))
    assert [(each.write, each.read_row) for each in back] == [(each.read, each.write_row) for each in there]


@pytest.mark.parametrize("parts", first(1, [1, 3, 64]))
def test_a_table_comes_from_pieces_and_from_memory_and_goes_back_to_either(tmp_path: Path, parts: int) -> None:
    """As `torch.chunk` cuts it, whatever is left for the last piece, and whether or not there are as many pieces."""
    model = pico.make_and_save(tmp_path / "hf", "qwen4", dtype=torch.bfloat16, split_ngram_parts=parts)
    stored, whole = load_file(tmp_path / "hf" / "model.safetensors"), model.state_dict()
    table = "model.layers.2.ple.ple_embedding.ngram_embedding"
    pieces = [stored[f"{table}.shard_{each}.weight"] for each in range(sum(table in name for name in stored))]
    assert 0 < len(pieces) <= parts and torch.equal(torch.cat(pieces), whole[f"{table}.weight"])
    run(tmp_path / "hf", tmp_path / "m", "megatron")
    run(tmp_path / "m", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    run(tmp_path / "hf", tmp_path / "dcp", "hf", container="dcp")
    run(tmp_path / "dcp", tmp_path / "again", "megatron")
    assert_same_tensors(tmp_path / "m", tmp_path / "again")


@pytest.mark.parametrize("container", ["torch_dist", *in_soak("torch")])
def test_it_comes_back_from_any_division(tmp_path: Path, container: str) -> None:
    pico.save(tmp_path / "hf", "qwen4", dtype=torch.bfloat16)
    assert_there_and_back(tmp_path / "hf", container=container, parallelism=Parallelism(2, 3, expert=2))


def test_numbers_that_hash_are_carried_as_they_are_and_read_with_care(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "qwen4", dtype=torch.bfloat16)
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.ple.ple_embedding.ngram_heads_offsets"
    tensors[name][0] = -1
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(DamagedCheckpoint, match=r"ngram_heads_offsets` has numbers from -1 to"):
        run(tmp_path / "hf", tmp_path / "m", "megatron")


def test_a_table_of_another_size_is_refused(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "qwen4", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"ngram_vocab_size_base": 40}))
    with pytest.raises(ShapeMismatch, match=r"ngram_embedding\.shard_0\.weight"):
        run(tmp_path / "hf", tmp_path / "m", "megatron")


def test_tensor_ranks_do_not_share_it() -> None:
    with pytest.raises(RecipeError, match="channel by channel is not shared by tensor-parallel ranks"):
        check(pico.shape("qwen4"), ParallelSettings(tensor=2))


def test_prediction_layers_travel_with_the_towers_of_the_wrapper(tmp_path: Path) -> None:
    """Their names begin with `mtp.`, and transformers passes over them."""
    tiny_wrappers.save(tmp_path / "hf", "qwen4_exp", dtype=torch.bfloat16)
    file = tmp_path / "hf" / "model.safetensors"
    added = {"mtp.layers.0.attn_hyper_connection.hc_norm.weight": torch.randn(256, dtype=torch.bfloat16)}
    save_file(load_file(file) | added, file, {"format": "pt"})
    assert_there_and_back(tmp_path / "hf")


def test_an_export_leaves_streams_n_grams_and_indexers_as_they_are(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "qwen4", dtype=torch.bfloat16)
    asked = Request.export(tmp_path / "hf", tmp_path / "out", "vllm", "dynamic", keep_misfits=True)
    codes = plan_command(asked).plan.codes
    assert not [name for name in codes if ".ple." in name or "hyper_connection" in name or "indexer" in name]
    assert {name.split(".")[-2] for name in codes} >= {"in_proj_qkv", "out_proj", "q_proj", "o_proj", "down_proj"}


def test_a_rows_numbers_and_its_parts_are_lowered_to_the_same_copies() -> None:
    """What is in order is lowered without numbering rows: the numbers would say the same."""
    model = pico.shape("qwen4")
    rows = [row for row in table_of(model).spelled({}, model) if row.count(model) and len(row.hf) > 1]
    assert len(rows) > 4
    for row in rows:
        sizes = [shape[0] for shape in row.shapes(model, "hf")]
        parts = [np.arange(size)[:, None] + 1000 * number for number, size in enumerate(sizes)]
        found = np.concatenate(
            [
                np.arange(each.read_row, each.read_row + each.rows) + 1000 * row.hf.index(str(each.read))
                for each in lower(row, model, "hf", "megatron", dict(zip(row.hf, sizes, strict=True)), [row.megatron])
            ]
        )
        assert found.tolist() == row.merge(parts, model)[:, 0].tolist(), param_map.names(row, "hf", {})


def with_codes(directory: Path, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A model in blocks of FP8 whose tables of n-grams are codes under one scale each, as Qwen3.8-Flash-Next-FP8 has
    them. Returns what it stores."""
    fp8_directories.make(directory, "fp8-block", "qwen4")
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if ".ngram_embedding.shard_" in name and name.endswith(".weight")]:
        tensors[name] = fp8_directories.random_codes(tensors[name].shape, generator, torch.float8_e4m3fn)
        tensors[f"{name.partition('.shard_')[0]}.weight_scale"] = torch.tensor([0.000199]).bfloat16()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    say(directory, modules_to_convert=["ngram_embedding"])
    return tensors


def say(directory: Path, **keys: Any) -> None:
    """Add these keys to its quantization config."""
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= keys
    (directory / "config.json").write_text(json.dumps(config))


def test_transformers_is_told_of_a_table_of_codes(tmp_path: Path) -> None:
    """It makes no FP8Embedding of another one, and computes with codes as if they were weights."""
    with_codes(tmp_path, torch.Generator().manual_seed(3))
    for names, number in ((["ngram_embedding"], 0), (["other"], 2), (None, 2)):
        say(tmp_path, modules_to_convert=names)
        found = [each.what for each in check_engine(HuggingFaceReader(tmp_path), engine_named("transformers"))]
        assert sum("modules_to_convert" in what for what in found) == number


def test_an_export_says_that_the_table_becomes_values(tmp_path: Path) -> None:
    with_codes(tmp_path / "fp8", torch.Generator().manual_seed(3))
    notes = plan_command(Request.export(tmp_path / "fp8", tmp_path / "out", "vllm", "dynamic")).notes
    assert any(note.startswith("The codes of 6 parts of tables of n-grams become BF16") for note in notes)


def test_what_is_codes_in_part_is_evaluated_with_decoded_weights(tmp_path: Path) -> None:
    tensors = with_codes(tmp_path, torch.Generator().manual_seed(3))
    for name in [name for name in tensors if name.endswith("in_proj_b.weight")]:
        del tensors[f"{name}_scale_inv"]
        tensors[name] = torch.randn(tensors[name].shape).bfloat16()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, words = load_stored(HuggingFaceReader(tmp_path))
    assert "weights from FP8 (not computed: inputs of linears that are codes in part)" in words


def test_a_table_of_codes_has_one_scale_and_comes_back_to_the_byte(tmp_path: Path) -> None:
    tensors = with_codes(tmp_path / "fp8", torch.Generator().manual_seed(3))
    run(tmp_path / "fp8", tmp_path / "bf16", "hf", "bf16")
    values = load_file(tmp_path / "bf16" / "model.safetensors")
    parts = [name for name in tensors if ".shard_" in name]
    assert len(parts) > 2
    for name in parts:  # as FP8Embedding computes the rows that it looks up
        scale = tensors[f"{name.partition('.shard_')[0]}.weight_scale"]
        assert torch.equal(values[name], tensors[name].to(scale.dtype) * scale)
    run(tmp_path / "fp8", tmp_path / "megatron", "megatron")
    for source in ("bf16", "megatron"):
        run(tmp_path / source, tmp_path / f"of {source}", "hf", "fp8")
        back = load_file(tmp_path / f"of {source}" / "model.safetensors")
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in tensors)


def test_a_table_that_was_trained_gets_one_new_scale_for_all_its_parts(tmp_path: Path) -> None:
    tensors = with_codes(tmp_path / "fp8", torch.Generator().manual_seed(3))
    run(tmp_path / "fp8", tmp_path / "bf16", "hf", "bf16")
    file = tmp_path / "bf16" / "model.safetensors"
    values = load_file(file)
    first, *others = sorted(name for name in tensors if ".layers.0." in name and ".shard_" in name)
    values[first][0, 0] = 1.0
    save_file(values, file, metadata={"format": "pt"})
    run(tmp_path / "bf16", tmp_path / "back", "hf", "fp8")
    back = load_file(tmp_path / "back" / "model.safetensors")
    scale = back[f"{first.partition('.shard_')[0]}.weight_scale"].float()
    assert abs(scale * 448 - 1) <= 2**-8  # rounded to BF16, as it was stored
    for name in (first, *others):
        worth = back[name].float() * scale
        assert bool(
            ((worth - values[name].float()).abs() <= (values[name].float().abs() / 16).clamp(scale * 2**-10)).all()
        )


def test_a_table_under_a_scale_for_each_row_is_refused(tmp_path: Path) -> None:
    tensors = with_codes(tmp_path, torch.Generator().manual_seed(3))
    name = next(name for name in tensors if name.endswith("ngram_embedding.weight_scale"))
    save_file({**tensors, name: torch.ones(7, 1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamagedCheckpoint, match="not one scale of FP8 codes"):
        plan_command(Request(tmp_path, tmp_path / "out", "hf", precision="bf16"))
