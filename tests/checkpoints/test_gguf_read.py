"""GGUF files: values are those that ggml decodes (tests/golden/ggml_blocks.py), under the names of published files."""

import contextlib
import json
import os
import random
import re
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import conversions
import gguf_files
import numpy as np
import pico
import pytest
import repository
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from soaking import first

from precisionctl.architectures.families import from_hf_config
from precisionctl.checkpoints.base import Hints
from precisionctl.checkpoints.chunks import read_rows, read_tensor
from precisionctl.checkpoints.gguf import tensors as gguf_tensors
from precisionctl.checkpoints.gguf.described_model import check_same, model_of_file
from precisionctl.checkpoints.gguf.families import FAMILIES, model_type_of
from precisionctl.checkpoints.gguf.head import GgufTensor, read_head
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import read_each
from precisionctl.checkpoints.hf_directory.companions import read_companions
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.tensor_changes import DECAY, KERNEL, KERNEL_IN_FOUR, VECTOR_AS_COLUMN, Both
from precisionctl.codes.ggml_formats import FORMATS, UNREAD
from precisionctl.commands.request import Request
from precisionctl.errors import (
    CheckpointError,
    DamagedCheckpoint,
    NotUnderstood,
    PrecisionctlError,
    UnknownArchitecture,
    UnknownFormat,
    UnmappedTensor,
)
from precisionctl.reports.inspect import describe
from precisionctl.verify.compare import compare

GOLDEN = repository.GOLDEN / "ggml_blocks.safetensors"
CODED = [form for form in FORMATS.values() if not form.dtype]


@pytest.mark.parametrize("form", CODED, ids=lambda form: form.name)
def test_blocks_decode_to_the_values_that_ggml_gives_to_the_last_bit(form: Any) -> None:
    name = form.name.lower().replace("_k", "_K")
    with safe_open(GOLDEN, "np") as golden:
        blocks, values = golden.get_tensor(f"{name}.blocks"), golden.get_tensor(f"{name}.values")
    assert (form.size, form.values) == (blocks.shape[1], values.shape[1])
    for rows in (1, 2, len(blocks)):  # of so many blocks each
        found = form.values_of(blocks.reshape(len(blocks) // rows, -1))
        assert np.array_equal(found.view(np.int32).reshape(values.shape), values.view(np.int32))


def test_every_format_is_read_or_refused_by_its_name() -> None:
    assert not FORMATS.keys() & UNREAD.keys()
    assert {4, 5, 31, 32, 33, 36, 37, 38} == set(range(43)) - FORMATS.keys() - UNREAD.keys()  # taken out of ggml


def test_a_llama_is_read_under_its_published_names_by_what_the_file_says_of_it(tmp_path: Path) -> None:
    (tmp_path / "llama.gguf").write_bytes(gguf_files.file(*gguf_files.llama(tmp_path / "llama")))
    reader, published = open_checkpoint(tmp_path / "llama.gguf"), open_checkpoint(tmp_path / "llama")
    assert reader.model == published.model and reader.specs.keys() == published.specs.keys()
    for name in published.specs:
        assert torch.equal(read_tensor(reader, name).bfloat16(), read_tensor(published, name)), name


def small(name: str, family: str, **changes: Any) -> Any:
    return pytest.param(family, changes, id=name)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        small("rotary pairs", "llama-all-biases"),
        small("norms with one added", "gemma3"),
        small("joined matrices", "phi3"),
        small("stacks of experts", "qwen3-moe", mlp_only_layers=[], decoder_sparse_step=1),
        small("gate, then up", "granite-moe"),
        small("latents", "deepseek-v3"),
        small("prediction layers", "glm4-moe"),
        small("delta nets", "qwen3-next", mlp_only_layers=[], decoder_sparse_step=1),
        small("heads of values in turns", "qwen3-5"),
        small("mixers", "nemotron-h"),
    ],
)
def test_every_change_of_values_has_its_inverse_row_by_row(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    pico.save(tmp_path, family, dtype=torch.bfloat16, **changes)
    published = open_checkpoint(tmp_path)
    model, table = published.model, FAMILIES[published.model.architecture].of(published.model).tensors
    made = dict[str, gguf_tensors.GgufPart]()
    for name in published.specs:
        row, names = table.of_hf(name, model) or pytest.fail(f"no row for {name}")
        values = read_tensor(published, name).float()
        parts = row.change.to_parts(values, model)
        assert tuple(tuple(part.shape) for part in parts) == row.change.part_shapes(tuple(values.shape), model)
        for index, (each, part) in enumerate(zip(names, parts, strict=True)):
            file = tmp_path / f"{len(made)}.bin"
            file.write_bytes(part.contiguous().numpy().tobytes())
            tensor = gguf_tensors.GgufTensor(tuple(part.shape), FORMATS[gguf_files.F32], file, 0)
            made[each] = gguf_tensors.GgufPart(each, tensor)
            assert table.of_gguf(each, model) == (row, name), index
        changed = gguf_tensors.ChangedTensor([made[each] for each in names], row.change, model)
        assert changed.spec.shape == values.shape
        source = type("Source", (), {"specs": {name: changed.spec}, "chunks": lambda _, name, c=changed: c.chunks()})()
        for row, count in ((0, len(values)), (1, 2), (len(values) - 1, 1)):
            found = read_rows(source, name, row, min(count, len(values) - row))
            expected = values.reshape(len(values), -1)[row : row + count]
            assert torch.allclose(found, expected, rtol=0, atol=2**-20), name


def test_codes_are_read_as_fp32_however_rows_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata, tensors = gguf_files.llama(tmp_path / "llama")
    values = load_file(tmp_path / "llama" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    tensors["blk.0.attn_q.weight"], decoded = gguf_files.q8_0(gguf_files.neighbours(values, 4))
    (tmp_path / "llama.gguf").write_bytes(gguf_files.file(metadata, tensors))
    reader, name = open_checkpoint(tmp_path / "llama.gguf"), "model.layers.0.self_attn.q_proj.weight"
    monkeypatch.setattr(gguf_tensors, "PIECE", 100)
    monkeypatch.setattr(gguf_tensors, "_APART", 1)
    found = read_tensor(reader, name)
    assert found.dtype == torch.float32 and torch.equal(gguf_files.neighbours(found, 4), decoded)
    for row, rows in ((0, 1), (7, 2), (15, 34), (63, 1)):
        assert torch.equal(read_rows(reader, name, row, rows), found[row : row + rows])


@pytest.mark.parametrize(("changed", "status"), [(0, "encoded"), (1, "differs")])
def test_verify_holds_codes_against_those_that_ggml_makes_of_the_values(
    tmp_path: Path, changed: int, status: str
) -> None:
    metadata, tensors = gguf_files.llama(tmp_path / "llama")
    name, file = "model.layers.0.self_attn.q_proj.weight", tmp_path / "llama" / "model.safetensors"
    published = load_file(file)
    values = torch.randint(-31, 32, published[name].shape) + 0.25
    values[:, ::32] = 127  # so the scale of each block is a power of two, and rounding it no matter
    published[name] = (values * 2.0**-10).bfloat16()
    save_file(published, file)
    (shape, number, data), _ = gguf_files.q8_0(gguf_files.neighbours(published[name], 4))
    tensors["blk.0.attn_q.weight"] = shape, number, data[:-1] + bytes([data[-1] ^ changed])
    (tmp_path / "llama.gguf").write_bytes(gguf_files.file(metadata, tensors))
    sides = [open_checkpoint(tmp_path / each) for each in ("llama.gguf", "llama")]
    for a, b in (sides, sides[::-1]):
        comparison = compare(a, b)
        (found,) = [tensor for tensor in comparison.tensors if tensor.status != "exact"]
        assert (found.name, found.status, comparison.equal) == (name, status, not changed)
        assert "Q8_0" in found.dtypes and found.sqnr_db is not None and found.sqnr_db > 40
        told = [each.what for each in comparison.not_compared if each.topic == "encodings of GGUF"]
        assert told == ([f"Q8_0 of {'A' if a is sides[0] else 'B'}"] if changed else [])


def test_verify_names_the_types_of_codes_that_are_not_made_here(tmp_path: Path) -> None:
    metadata, tensors = gguf_files.llama(tmp_path / "llama")
    (number,) = (number for number, form in FORMATS.items() if form.name == "Q4_1")
    for part in ("attn_q", "ffn_up"):
        shape = tensors[f"blk.0.{part}.weight"][0]
        tensors[f"blk.0.{part}.weight"] = shape, number, bytes(shape[0] * shape[1] // 32 * FORMATS[number].size)
    (tmp_path / "llama.gguf").write_bytes(gguf_files.file(metadata, tensors))
    found = compare(open_checkpoint(tmp_path / "llama"), open_checkpoint(tmp_path / "llama.gguf"))
    differing = {tensor.name: (tensor.status, tensor.dtypes) for tensor in found.tensors if not tensor.equal}
    names = (f"model.layers.0.{module}.weight" for module in ("self_attn.q_proj", "mlp.up_proj"))
    assert differing == dict.fromkeys(names, ("differs", "bfloat16 / Q4_1"))
    assert ("encodings of GGUF", "Q4_1 of B") in [(each.topic, each.what) for each in found.not_compared]


def test_two_changes_compute_in_fp32_where_one_of_them_does() -> None:
    """A tensor in F16 whose values only move is one in FP16."""
    assert not Both(KERNEL, KERNEL_IN_FOUR).computes
    assert Both(DECAY, VECTOR_AS_COLUMN).computes and Both(VECTOR_AS_COLUMN, DECAY).computes


@pytest.mark.parametrize(
    ("file_type", "forms", "scheme"),
    [(2, ("Q4_0",), "q4_0"), (2, ("Q4_0", "Q8_0"), None), (8, ("Q5_0",), None), (None, ("Q8_0",), None)],
)
def test_no_scheme_is_named_that_makes_no_such_file(
    tmp_path: Path, file_type: int | None, forms: tuple[str, ...], scheme: str | None
) -> None:
    """llama_ftype has 2 for mostly Q4_0, of which llama-quantize makes some matrices in other types; 8 for Q5_0."""
    metadata, tensors = gguf_files.llama(tmp_path / "llama")
    numbers = {form.name: number for number, form in FORMATS.items()}
    for form, part in zip(forms, ("attn_q", "ffn_up"), strict=False):
        shape = tensors[f"blk.0.{part}.weight"][0]
        size = shape[0] * shape[1] // 32 * FORMATS[numbers[form]].size
        tensors[f"blk.0.{part}.weight"] = shape, numbers[form], bytes(size)
    if file_type is not None:
        metadata["general.file_type"] = file_type
    (tmp_path / "llama.gguf").write_bytes(gguf_files.file(metadata, tensors))
    (note,) = (note for note in open_checkpoint(tmp_path / "llama.gguf").notes() if "codes of GGUF" in note)
    end = (
        f"--scheme {scheme}` makes new codes of these values, perhaps others."
        if scheme
        else "There is no way back to those codes."
    )
    assert note.endswith(end)


def test_a_conversion_needs_no_reference_and_exports_are_those_of_the_values(tmp_path: Path) -> None:
    metadata, tensors = gguf_files.llama(tmp_path / "published")
    for name, (shape, _, data) in tensors.items():
        if name.startswith("blk.") and len(shape) == 2:
            tensor = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(shape)
            tensors[name] = gguf_files.q8_0(tensor)[0]
    metadata["general.file_type"] = 7
    (tmp_path / "llama.gguf").write_bytes(gguf_files.file(metadata, tensors))
    said = describe(open_checkpoint(tmp_path / "llama.gguf"))
    of_model = [data for name, (_, _, data) in tensors.items() if name != "rope_freqs.weight"]
    assert sum(said["bytes_by_dtype"].values()) == sum(map(len, of_model))
    assert "Q8_0" in said["bytes_by_dtype"] and said["precision"] == "Q8_0 codes of GGUF, read as float32"
    command = conversions.run(tmp_path / "llama.gguf", tmp_path / "hf", "hf", verify=True)
    (note,) = (note for note in command.notes if "Weights were Q8_0 codes of GGUF, read as float32" in note)
    assert "--target llama.cpp --scheme q8_0` makes new codes of these values, perhaps others" in note
    assert open_checkpoint(tmp_path / "hf").model == open_checkpoint(tmp_path / "published").model
    for source in ("llama.gguf", "hf"):
        export = Request.export(tmp_path / source, tmp_path / f"{source}-fp8", "vllm", "dynamic")
        conversions.carry_out(export)
    one, other = (tmp_path / f"{source}-fp8" / "model.safetensors" for source in ("llama.gguf", "hf"))
    assert one.read_bytes() == other.read_bytes()


def reference(directory: Path, **changes: Any) -> Hints:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return Hints(companions=read_companions(directory), reference=directory)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rms_norm_eps": 1e-6}, "config.json is of another model: rms_norm_eps is 1e-06, and in the file 1e-05"),
        ({"vocab_size": 251}, "vocab_size is 251, and in the file 250"),
        ({"num_attention_heads": 8}, "num_attention_heads is 8, and in the file 4"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "of another model"),
        ({"rope_parameters": gguf_files.LLAMA3 | {"low_freq_factor": 2.0}}, "of another model than the reference"),
        ({"model_type": "qwen2"}, "config.json is of a 'qwen2', and the file of llama.cpp's llama"),
        ({"model_type": ["llama"]}, "config.json is of a .'llama'., and the file"),
    ],
)
def test_a_reference_of_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    (tmp_path / "llama.gguf").write_bytes(gguf_files.file(*gguf_files.llama(tmp_path / "llama")))
    with pytest.raises(DamagedCheckpoint, match=match):
        open_checkpoint(tmp_path / "llama.gguf", None, reference(tmp_path / "llama", **changes))


def test_a_reference_says_what_the_file_does_not(tmp_path: Path) -> None:
    (tmp_path / "llama.gguf").write_bytes(gguf_files.file(*gguf_files.llama(tmp_path / "llama")))
    hints = reference(tmp_path / "llama", model_type="mistral", sliding_window=32)
    assert open_checkpoint(tmp_path / "llama.gguf", None, hints).model.sliding_window == 32


@pytest.mark.parametrize("end", [7, 250])  # a token, and one beyond the vocabulary
def test_the_tokens_that_a_file_names_are_in_what_is_made_of_it(tmp_path: Path, end: int) -> None:
    metadata, tensors = gguf_files.llama(tmp_path / "llama")
    said = {"tokenizer.ggml.bos_token_id": 3, "tokenizer.ggml.eos_token_id": end}
    (tmp_path / "llama.gguf").write_bytes(gguf_files.file({**metadata, **said}, tensors))
    command = conversions.run(tmp_path / "llama.gguf", tmp_path / "hf", "hf")
    assert any("names the token that ends" in note for note in command.notes) == (end == 250)
    for name in ("config.json", "generation_config.json"):
        made = json.loads((tmp_path / "hf" / name).read_text())
        assert (made["bos_token_id"], made.get("eos_token_id")) == (3, end if end == 7 else None)
    for ends, told in (([2, end], 0), (2, 1)):
        hints = reference(tmp_path / "llama", eos_token_id=ends)
        reader: Any = open_checkpoint(tmp_path / "llama.gguf", None, hints)
        assert [note[:11] for note in reader.notes()] == ["A text ends"] * told


def test_factors_of_rotary_embeddings_that_no_settings_are_known_for_are_refused(tmp_path: Path) -> None:
    metadata, tensors = gguf_files.llama(tmp_path / "llama")
    tensors["rope_freqs.weight"] = gguf_files.plain(gguf_files.llama3_factors() + torch.eye(8)[5])
    (tmp_path / "llama.gguf").write_bytes(gguf_files.file(metadata, tensors))
    with pytest.raises(CheckpointError, match="other factors than Llama 3's.*--reference"):
        open_checkpoint(tmp_path / "llama.gguf")


@pytest.mark.parametrize(
    ("family", "name", "error", "match"),
    [
        ("phi", "rope_freqs", DamagedCheckpoint, "no rotary embeddings of llama.cpp's phi2 are scaled by it"),
        ("minicpm3", "rope_freqs", DamagedCheckpoint, "no rotary embeddings of llama.cpp's minicpm3"),
        ("qwen3", "rope_factors_long", DamagedCheckpoint, "no rotary embeddings of llama.cpp's qwen3"),
        ("gemma4", "rope_freqs", CheckpointError, "other factors than Gemma 4's"),  # none of which is 1
    ],
)
def test_factors_that_a_family_is_not_scaled_by_are_one_error(
    tmp_path: Path, family: str, name: str, error: type[PrecisionctlError], match: str
) -> None:
    (tmp_path / "factors").write_bytes(torch.full((8,), 2.0).numpy().tobytes())
    file, factors = described(family), GgufTensor((8,), FORMATS[0], tmp_path / "factors", 0)
    tensors = {**file.tensors, f"{name}.weight": factors}
    with pytest.raises(error, match=match):
        model_of_file(replace(file, tensors=tensors), pico.shape(family).architecture)


def split(directory: Path, **changes: Any) -> None:
    """A Llama in two files."""
    metadata, tensors = gguf_files.llama(directory.parent / "llama")
    parts = [dict(list(tensors.items())[:9]), dict(list(tensors.items())[9:])]
    said = {"split.count": 2, "split.tensors.count": len(tensors)} | changes
    directory.mkdir()
    for number, part in enumerate(parts):
        here = (metadata if number == 0 else {}) | {"split.no": number} | said
        (directory / f"llama-{number + 1:05}-of-00002.gguf").write_bytes(gguf_files.file(here, part))


def test_files_of_one_model_are_read_together_by_any_of_them_or_their_directory(tmp_path: Path) -> None:
    split(tmp_path / "split")
    published = open_checkpoint(tmp_path / "llama")
    first = tmp_path / "split" / "llama-00001-of-00002.gguf"
    for path in (tmp_path / "split", first, first.with_name("llama-00002-of-00002.gguf")):
        reader = open_checkpoint(path)
        assert reader.model == published.model and reader.specs.keys() == published.specs.keys()
        assert len(reader.files) == 2
        for name in published.specs:
            assert torch.equal(read_tensor(reader, name).bfloat16(), read_tensor(published, name)), name
    first.with_name("another.gguf").write_bytes(first.read_bytes())
    with pytest.raises(UnknownFormat, match="2 models in GGUF: another.gguf, llama-00001-of-00002.gguf"):
        open_checkpoint(tmp_path / "split")
    first.with_name("llama-00002-of-00002.gguf").unlink()
    with pytest.raises(DamagedCheckpoint, match="a file is missing"):
        open_checkpoint(first)


@pytest.mark.parametrize("number", [1, 2])
def test_a_file_elsewhere_is_read_only_if_it_is_the_one_that_was_named(tmp_path: Path, number: int) -> None:
    split(tmp_path / "split")
    moved = tmp_path / "split" / f"llama-0000{number}-of-00002.gguf"
    moved.symlink_to(moved.rename(tmp_path / "elsewhere.gguf"))
    assert len(open_checkpoint(moved).files) == 2
    for path in (tmp_path / "split", tmp_path / "split" / f"llama-0000{3 - number}-of-00002.gguf"):
        with pytest.raises(DamagedCheckpoint, match=f"a symbolic link leads out of the directory.*0000{number}-of"):
            open_checkpoint(path)


@pytest.mark.parametrize("pattern", [3, [True, True, False, True, True, False]], ids=["number", "list"])
def test_windows_are_listed_or_all_but_every_so_many(pattern: object) -> None:
    sizes = dict.fromkeys(("head_count", "head_count_kv", "key_length", "value_length", "sliding_window"), 8)
    said = {f"attention.{key}": size for key, size in sizes.items()} | {
        "block_count": 6,
        "embedding_length": 64,
        "feed_forward_length": 64,
        "context_length": 64,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window_pattern": pattern,
    }
    embedding = GgufTensor((10, 64), FORMATS[0], Path("a.gguf"), 0)
    metadata = {f"gemma3.{key}": value for key, value in said.items()}
    found = FAMILIES["gemma3_text"].read(Described(metadata, {"token_embd.weight": embedding}, "gemma3"))
    assert found["window_layers"] == (True, True, False) * 2


@pytest.mark.parametrize("name", ["a.gguf", "a-00001-of-00001.gguf", "a-00000-of-00000.gguf"])
def test_a_pipe_is_one_error_and_waits_for_nobody(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises((DamagedCheckpoint, UnknownFormat)):
            open_checkpoint(path)


@pytest.mark.parametrize(("changes", "match"), [({"split.count": 3}, "file 0 of 3"), ({"split.tensors.count": 9}, "9")])
def test_files_that_are_not_of_one_model_are_refused(tmp_path: Path, changes: dict[str, int], match: str) -> None:
    split(tmp_path / "split", **changes)
    with pytest.raises(DamagedCheckpoint, match=match):
        open_checkpoint(tmp_path / "split")


Changed = Callable[[dict[str, Any], dict[str, gguf_files.Described]], Any]
ZEROS = gguf_files.plain(torch.zeros(64, 64))


def say(key: str, value: Any) -> Changed:
    return lambda metadata, tensors: metadata.update({key: value})


def unsaid(key: str) -> Changed:
    return lambda metadata, tensors: metadata.pop(key)


def put(name: str, tensor: gguf_files.Described) -> Changed:
    return lambda metadata, tensors: tensors.update({name: tensor})


ONE_SCALE = gguf_files.plain(torch.ones(1))


def in_nvfp4(scale: torch.Tensor) -> Changed:
    codes, stored = ((96, 64), 40, bytes(96 * 36)), gguf_files.plain(scale)
    return lambda metadata, tensors: tensors.update({"blk.0.ffn_up.weight": codes, "blk.0.ffn_up.scale": stored})


REFUSED: dict[str, tuple[Changed, type[PrecisionctlError], str]] = {
    "no architecture": (unsaid("general.architecture"), UnknownArchitecture, "architecture None"),
    "an architecture that is not read": (say("general.architecture", "rwkv7"), UnknownArchitecture, "'rwkv7'.*Known"),
    "an architecture that is a number": (say("general.architecture", 7), UnknownArchitecture, "architecture 7"),
    "no layers": (unsaid("llama.block_count"), DamagedCheckpoint, "no `llama.block_count`"),
    "layers in words": (say("llama.block_count", "two"), DamagedCheckpoint, "llama.block_count is 'two'"),
    "no heads": (say("llama.attention.head_count", 0), DamagedCheckpoint, "head_count is 0"),
    "heads of their own": (say("llama.attention.head_count_kv", [2, 4]), DamagedCheckpoint, r"head_count_kv is \[2, 4"),
    "an epsilon that is none": (
        say("llama.attention.layer_norm_rms_epsilon", float("nan")),
        DamagedCheckpoint,
        "epsilon is nan",
    ),
    "a part of each head turned": (
        say("llama.rope.dimension_count", 8),
        UnknownArchitecture,
        "rotary_factor=0.5",
    ),
    "another scaling": (say("llama.rope.scaling.type", "ntk"), UnknownArchitecture, "scaling of type 'ntk'"),
    "a setting that is not read": (
        say("llama.attention.clamp_kqv", 8.0),
        UnknownArchitecture,
        "settings of llama.cpp's llama that are not read: attention.clamp_kqv",
    ),
    "values of another length": (say("llama.attention.value_length", 8), UnknownArchitecture, "value_length is 8"),
    "another vocabulary": (say("llama.vocab_size", 251), UnknownArchitecture, "vocab_size is 251, and 250"),
    "attention to what follows": (say("llama.attention.causal", False), UnknownArchitecture, "causal is False"),
    "a tensor of none": (put("blk.0.attn_sinks.weight", ZEROS), UnmappedTensor, "attn_sinks.weight` is no tensor"),
    "a layer with a zero before it": (put("blk.00.ffn_up.weight", ZEROS), UnmappedTensor, "blk.00.ffn_up.weight"),
    "an adapter": (put("blk.0.attn_q.weight.lora_a", ZEROS), UnmappedTensor, "lora_a` is no tensor"),
    "heads that are cut": (
        put("blk.0.attn_q.weight", gguf_files.plain(torch.zeros(60, 64))),
        DamagedCheckpoint,
        "60 rows are no heads of 16, in pairs",
    ),
    "a vector in codes": (
        put("blk.0.attn_norm.weight", ((64,), gguf_files.Q8_0, bytes(68))),
        DamagedCheckpoint,
        "attn_norm.weight` is a vector in codes",
    ),
    "a tensor without rows": (
        put("blk.0.attn_norm.weight", ((0,), gguf_files.F32, b"")),
        DamagedCheckpoint,
        "attn_norm.weight` has no rows",
    ),
    "a tensor named as an expert": (
        put("blk.0.ffn_gate_exps.weight[0]", ZEROS),
        DamagedCheckpoint,
        r"`blk.0.ffn_gate_exps.weight\[0\]` is named as a slice of another tensor",
    ),
    "factors of integers": (put("rope_freqs.weight", ((2, 32), 0, bytes(256))), DamagedCheckpoint, "no factors"),
    "a format that is not read": (
        put("blk.0.ffn_up.weight", ((96, 64), 41, bytes(96 * 18))),
        NotUnderstood,
        "ffn_up.weight` is Q1_0, which is not read",
    ),
    "a scale of values": (put("blk.0.ffn_up.scale", ONE_SCALE), UnmappedTensor, "ffn_up.scale` is no tensor"),
    "scales of another number": (
        in_nvfp4(torch.ones(2)),
        DamagedCheckpoint,
        r"`blk.0.ffn_up.scale` is F32 \[2\], and `blk.0.ffn_up.weight` has F32 \[1\]",
    ),
    "a scale that is NaN": (in_nvfp4(torch.tensor([torch.nan])), DamagedCheckpoint, "ffn_up.scale` holds .* NaN"),
    "a format that is none": (
        put("blk.0.ffn_up.weight", ((1, 1), 99, bytes(4))),
        NotUnderstood,
        "in format 99 of ggml",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_one_error(tmp_path: Path, case: str) -> None:
    changed, error, match = REFUSED[case]
    metadata, tensors = gguf_files.llama(tmp_path / "llama")
    changed(metadata, tensors)
    (tmp_path / "llama.gguf").write_bytes(gguf_files.file(metadata, tensors))
    with pytest.raises(error, match=match):
        open_checkpoint(tmp_path / "llama.gguf")


ONE = {"a": ((2, 3), gguf_files.F32, bytes(24))}
SOUND = gguf_files.file({"k": 1}, ONE)
KEY = gguf_files.string("k")
TENSOR = gguf_files.string("a") + struct.pack("<I2QIQ", 2, 3, 2, 0, 0)


def put_in(old: bytes, new: bytes) -> bytes:
    assert SOUND.count(old) == 1
    return SOUND.replace(old, new)


LIES: dict[str, bytes] = {
    "nothing": b"",
    "no GGUF": b"GGML" + SOUND[4:],
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "version 1": SOUND[:4] + struct.pack("<I", 1) + SOUND[8:],
    "version 4": SOUND[:4] + struct.pack("<I", 4) + SOUND[8:],
    "big endian": SOUND[:4] + struct.pack(">I", 3) + SOUND[8:],
    "2**63 tensors": SOUND[:8] + struct.pack("<QQ", 1 << 63, 1) + SOUND[24:],
    "2**63 keys": SOUND[:8] + struct.pack("<QQ", 1, 1 << 63) + SOUND[24:],
    "a tensor more": SOUND[:8] + struct.pack("<QQ", 2, 1) + SOUND[24:],
    "a key more": SOUND[:8] + struct.pack("<QQ", 1, 2) + SOUND[24:],
    "a key of 2**60 letters": put_in(KEY, struct.pack("<Q", 1 << 60) + b"k"),
    "a key that is no UTF-8": put_in(KEY, gguf_files.string(b"\xff")),
    "a key twice": gguf_files.file({"k": 1, "l": 2}, ONE).replace(gguf_files.string("l"), KEY),
    "a type that is none": put_in(gguf_files.value(1), struct.pack("<II", 13, 1)),
    "a truth of 2": put_in(gguf_files.value(1), struct.pack("<IB", 7, 2)),
    "a list of truths with a 3": put_in(gguf_files.value(1), struct.pack("<IIQBB", 9, 7, 2, 1, 3)),
    "a list of 2**60": put_in(gguf_files.value(1), struct.pack("<IIQ", 9, 4, 1 << 60)),
    "a list of 2**60 strings": put_in(gguf_files.value(1), struct.pack("<IIQ", 9, 8, 1 << 60)),
    "many lists": gguf_files.file({f"k{number}": [True] * 4096 for number in range(17)}, ONE),
    "a list of lists": put_in(gguf_files.value(1), struct.pack("<IIQIQ", 9, 9, 1, 4, 0)),
    "a string of the file's length": put_in(gguf_files.value(1), struct.pack("<IQ", 8, len(SOUND))),
    "an alignment of 0": gguf_files.file({"general.alignment": 0}, ONE),
    "an alignment of 3": gguf_files.file({"general.alignment": 3}, ONE),
    "an alignment in words": gguf_files.file({"general.alignment": "32"}, ONE),
    "an alignment of 2**31": gguf_files.file({"general.alignment": 1 << 31}, ONE),
    "a tensor twice": gguf_files.file({}, {**ONE, "b": ONE["a"]}).replace(
        gguf_files.string("b"), gguf_files.string("a")
    ),
    "a name of a thousand letters": gguf_files.file({}, {"a" * 1000: ONE["a"]}),
    "no dimensions": gguf_files.file({}, {"a": ((), 0, bytes(4))}),
    "five dimensions": gguf_files.file({}, {"a": ((1, 1, 1, 2, 3), 0, bytes(24))}),
    "2**62 rows": put_in(TENSOR, gguf_files.string("a") + struct.pack("<I2QIQ", 2, 3, 1 << 62, 0, 0)),
    "2**64 - 1 columns": put_in(TENSOR, gguf_files.string("a") + struct.pack("<I2QIQ", 2, (1 << 64) - 1, 2, 0, 0)),
    "rows of parts of blocks": gguf_files.file({}, {"a": ((2, 33), 8, bytes(70))}),
    "an offset within the head": put_in(
        TENSOR, gguf_files.string("a") + struct.pack("<I2QIQ", 2, 3, 2, 0, (1 << 64) - 32)
    ),
    "an offset behind the file": put_in(TENSOR, gguf_files.string("a") + struct.pack("<I2QIQ", 2, 3, 2, 0, 1 << 40)),
    "tensors that overlap": gguf_files.file({}, {"a": ONE["a"], "b": ONE["a"]}).replace(
        struct.pack("<IQ", 0, 32), struct.pack("<IQ", 0, 0)
    ),
    "a byte less": SOUND[: len(SOUND) - 9],
    "bytes behind it": SOUND + bytes(33),
}


def test_the_file_that_is_lied_about_is_sound(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(SOUND)
    assert read_head(tmp_path / "a.gguf").tensors["a"].shape == (2, 3)


@pytest.mark.parametrize("case", LIES)
def test_a_head_that_lies_is_one_error_and_nothing_is_made_as_large(tmp_path: Path, case: str) -> None:
    (tmp_path / "a.gguf").write_bytes(LIES[case])
    tracemalloc.start()
    with pytest.raises((DamagedCheckpoint, NotUnderstood)) as refused:
        read_head(tmp_path / "a.gguf")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused.value.do and len(str(refused.value)) < 500 and most < 1 << 20


@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_codes_whose_scale_is_no_number_are_damage_when_they_are_read(tmp_path: Path, scale: float) -> None:
    metadata, tensors = gguf_files.llama(tmp_path / "llama")
    (shape, number, data), _ = gguf_files.q8_0(torch.randn(64, 64))
    tensors["blk.0.attn_q.weight"] = shape, number, struct.pack("<e", scale) + data[2:]
    (tmp_path / "a.gguf").write_bytes(gguf_files.file(metadata, tensors))
    reader = open_checkpoint(tmp_path / "a.gguf")
    with pytest.raises(DamagedCheckpoint, match="q_proj.*infinite or NaN|attn_q.*infinite or NaN"):
        read_tensor(reader, "model.layers.0.self_attn.q_proj.weight")


def test_a_head_cut_anywhere_is_one_error(tmp_path: Path) -> None:
    whole = gguf_files.file({"k": 1, "l": ["a", "b"], "m": [1.0, 2.0], "n": "text"}, ONE)
    for length in range(len(whole) - 8):
        (tmp_path / "a.gguf").write_bytes(whole[:length])
        with pytest.raises(DamagedCheckpoint):
            read_head(tmp_path / "a.gguf")


def test_a_file_whose_head_is_damaged_anywhere_is_read_or_is_one_error(tmp_path: Path) -> None:
    whole, chance = gguf_files.file(*gguf_files.llama(tmp_path / "llama")), random.Random(0)
    opened = 0
    for _ in range(300):
        data, at = bytearray(whole), chance.randrange(4, 2400)
        data[at : at + 8] = chance.choice([bytes(8), b"\xff" * 8, struct.pack("<Q", 1 << 62), chance.randbytes(1)])
        (tmp_path / "a.gguf").write_bytes(data)
        with contextlib.suppress(PrecisionctlError):
            reader = open_checkpoint(tmp_path / "a.gguf")
            for name in reader.specs:
                read_tensor(reader, name)
            opened += 1
    assert 0 < opened < 300


ODD: list[Any] = [None, [], "x", 0, 1, 3, -1, 2**31, 2**62, float("nan"), -1.5, 1e30, True, [1, 2], [True, False]]


@pytest.mark.parametrize("family", first(24, gguf_files.WRITTEN))
def test_odd_values_of_any_key_are_read_or_are_one_error_that_speaks_of_no_config_json(family: str) -> None:
    whole = described(family)
    for key in whole.metadata:
        for odd in ODD:
            metadata = {name: value for name, value in {**whole.metadata, key: odd}.items() if value is not None}
            try:
                model_of_file(replace(whole, metadata=metadata), pico.shape(family).architecture)
            except PrecisionctlError as error:
                assert "config.json" not in error.what, (key, odd)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llama-3", "llama.feed_forward_length"),
        ("mixtral", "llama.expert_used_count"),
        ("mixtral", "llama.feed_forward_length"),
        ("granite-moe-shared", "granitemoe.feed_forward_length"),
        ("jamba", "jamba.embedding_length"),
        ("qwen3-moe", "qwen3moe.expert_feed_forward_length"),
    ],
)
def test_a_number_that_is_no_size_is_named_by_the_key_that_says_it(family: str, key: str) -> None:
    whole = described(family)
    with pytest.raises(DamagedCheckpoint, match=f"^{key} is 0, not a size"):
        model_of_file(replace(whole, metadata={**whole.metadata, key: 0}), pico.shape(family).architecture)


@pytest.mark.parametrize("family", ["jamba", "mamba2", "gpt2", "bloom"])
def test_a_file_of_a_family_without_rotary_embeddings_is_refused_if_it_says_how_many_channels_turn(family: str) -> None:
    whole = described(family)
    metadata = {**whole.metadata, f"{whole.architecture}.rope.dimension_count": 4}
    with pytest.raises(UnknownArchitecture, match="settings .* that are not read: rope.dimension_count"):
        model_of_file(replace(whole, metadata=metadata), pico.shape(family).architecture)


def test_a_file_with_a_linear_in_the_place_of_attention_is_refused() -> None:
    """llama.cpp's src/models/deci.cpp: heads, and none of keys."""
    whole = described("nemotron-nas")
    for heads in ([4, 4, 0, 4], [0, 0, 0, 4]):
        metadata = {**whole.metadata, "deci.attention.head_count": heads}
        with pytest.raises(UnknownArchitecture, match="a linear in the place of attention"):
            model_of_file(replace(whole, metadata=metadata), "nemotron-nas")


@dataclass(frozen=True)
class Watched(Described):
    """Metadata that know which keys were asked for."""

    asked: set[str] = field(default_factory=set)

    def said(self, key: str) -> Any:
        self.asked.add(key)
        return super().said(key)


COUNTED_BY = {"attention.key_length", "attention.sliding_window", "nextn_predict_layers"}
"""Keys of others that rules count by, and a file may not have in a family without these."""
PASSED_OVER = {
    *("attention.head_count_kv", "attention.sliding_window_pattern", "attention.value_length", "context_length"),
    *("expert_shared_count", "expert_shared_feed_forward_length", "expert_used_count", "rope.dimension_sections"),
    *("n_deepstack_layers", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("leading_dense_block_count", "moe_every_n_layers", "activation_sparsity_scale"),
    *(f"ssm.{key}" for key in ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank")),
}
"""Keys by which llama.cpp computes nothing in some families, or not beside what other keys say."""


@pytest.mark.parametrize("name", gguf_files.WRITTEN)
def test_the_keys_that_a_family_says_are_those_that_it_reads(name: str) -> None:
    whole = described(name)
    gate = replace(whole.tensors["token_embd.weight"], shape=(4, 64))
    file = Watched(whole.metadata, {**whole.tensors, "blk.0.attn_gate.weight": gate}, whole.architecture)
    family = FAMILIES[pico.shape(name).architecture].of_file(file)
    said = {key for entry in family.entries for key in entry.keys}
    file.asked.clear()
    with contextlib.suppress(UnknownArchitecture):  # of rules between keys and tensors, which are not there
        read_each(family.entries, file)
        assert said - file.asked <= PASSED_OVER
    assert file.asked - said <= COUNTED_BY


LISTING = ("laguna", "cohere2-moe", "granite-swa", "qwen3-next", "glm-moe-dsa", "exaone-moe", "step3p5")


@pytest.mark.parametrize("family", [family for family in LISTING if family not in pico.ABSENT])
@pytest.mark.parametrize("layers", [1, 99])
def test_lists_of_other_numbers_of_layers_are_one_error(family: str, layers: int) -> None:
    file = described(family)
    lists = [key for key, value in file.metadata.items() if isinstance(value, list) and type(value[0]) is not int]
    if family == "laguna":
        lists = ["laguna.attention.sliding_window_pattern"]
    assert lists
    for key in lists:
        metadata = {**file.metadata, key: [True] * layers}
        with pytest.raises(DamagedCheckpoint, match=re.escape(f"{key} is [True")):
            FAMILIES[pico.shape(family).architecture].read(replace(file, metadata=metadata))


@pytest.mark.parametrize("family", ["exaone-moe", "glm-moe-dsa"])
def test_layers_of_prediction_may_be_in_lists_or_not_and_are_no_more_than_all(family: str) -> None:
    file, table = described(family), FAMILIES[pico.shape(family).architecture]
    key = "attention.sliding_window_pattern" if family == "exaone-moe" else "attention.indexer.types"
    said = {name.partition(".")[2]: value for name, value in file.metadata.items()}
    decoder = said["block_count"] - said.get("nextn_predict_layers", 0)
    pattern = [layer % 2 == 0 for layer in range(decoder)]
    for predicting, listed in ((1, [*pattern, False]), (1, pattern), (0, pattern)):
        changed = {"block_count": decoder + predicting, "nextn_predict_layers": predicting, key: listed}
        metadata = {f"{file.architecture}.{name}": value for name, value in {**said, **changed}.items()}
        fields = table.read(replace(file, metadata=metadata))
        assert fields["num_layers"] == decoder
        assert fields["window_layers" if family == "exaone-moe" else "dsa.layers"] == tuple(pattern)
    metadata = {**file.metadata, f"{file.architecture}.nextn_predict_layers": 99}
    with pytest.raises(DamagedCheckpoint, match="nextn_predict_layers is 99"):
        table.read(replace(file, metadata=metadata))


def described(family: str, **changes: Any) -> Described:
    """What a file says of a model, without most tensors."""
    model = from_hf_config(pico.config(family, **{**gguf_files.WRITTEN[family], **changes}))
    said: dict[str, Any] = {
        key: value.tolist() if isinstance(value, np.generic | np.ndarray) else value
        for key, value in gguf_files.metadata(model).items()
        if not key.startswith("general.")
    }
    tensors = {"token_embd.weight": GgufTensor((model.vocab_size, 64), FORMATS[0], Path("a.gguf"), 0)}
    return Described(said, tensors, FAMILIES[model.architecture].of(model).architecture)


@pytest.mark.parametrize(
    ("family", "reference"),
    [
        *[("gemma4", "gemma4-moe"), ("gemma4-moe", "gemma4")],
        *[("granite-hybrid", "granite-hybrid-dense"), ("granite-hybrid-dense", "granite-hybrid")],
    ],
)
def test_a_file_with_experts_and_a_reference_without_or_the_reverse_are_two_models(family: str, reference: str) -> None:
    layers = {key: pico.config(family)[key] for key in ("num_hidden_layers", "layer_types")}
    config = pico.config(reference, **{**gguf_files.WRITTEN[reference], **layers})
    file, model = described(family), from_hf_config(config)
    with pytest.raises(DamagedCheckpoint, match="is of another model: .*moe is (None, and in the file )?used"):
        check_same(file, model, config, "config.json")


def scaled(kind: str, factor: float = 4.0, **more: Any) -> dict[str, Any]:
    also = {f"yarn_{key}": value for key, value in more.items()}
    return {"type": kind, "factor": factor, **({"original_context_length": 32} if kind == "yarn" else {}), **also}


@pytest.mark.parametrize(
    ("family", "said", "match"),
    [
        ("smollm3", scaled("yarn", attn_factor=1.5), "yarn with attention_factor 1.5"),
        ("glm4-moe-lite", scaled("linear"), "scaled as linear"),
        ("deepseek-v3.2", scaled("yarn", log_multiplier=0.08), "yarn with mscale_all_dim 0.8"),
        ("glm4-moe-lite", scaled("yarn"), "no `deepseek2.rope.scaling.yarn_log_multiplier`"),
        ("glm-moe-dsa", scaled("yarn", log_multiplier=0.1), "scaled as yarn"),
        ("hunyuan", {"factor": 4.0}, "settings .* that are not read: rope.scaling.factor"),
        ("qwen3", {"factor": 4.0}, "settings .* that are not read: rope.scaling.factor"),
        ("exaone-moe", {"type": "none", "factor": 4.0}, "settings .* that are not read: rope.scaling.factor"),
        ("qwen3", {"type": "linear", "factor": 4.0, "yarn_beta_fast": 8.0}, "not read: rope.scaling.yarn_beta_fast"),
        ("olmo3", {"freq_base_swa": 1e4}, "freq_base_swa is 10000.0, and 150000.0"),
    ],
)
def test_rotary_embeddings_that_llama_cpp_computes_otherwise_than_the_file_says_are_refused(
    family: str, said: dict[str, Any], match: str
) -> None:
    file = described(family)
    keys = {f"rope.{key}" if "base" in key else f"rope.scaling.{key}": value for key, value in said.items()}
    metadata = {**file.metadata, **{f"{file.architecture}.{key}": value for key, value in keys.items()}}
    with pytest.raises(PrecisionctlError, match=match):
        model_of_file(replace(file, metadata=metadata), pico.shape(family).architecture)


@pytest.mark.parametrize("scaling", [{"rope_type": "linear"}, {"rope_type": "yarn"}, {"rope_type": "default"}])
def test_a_hunyuan_is_read_as_it_is_scaled(scaling: dict[str, Any]) -> None:
    file = described("hunyuan", rope_parameters={**scaling, "factor": 4.0, "rope_theta": 1e4})
    assert ((model_of_file(file, "hunyuan_v1_dense").rope_scaling or {}).get("factor")) == (
        None if scaling["rope_type"] == "default" else 4.0
    )


@pytest.mark.parametrize("family", ["hunyuan", "nemotron"])
def test_what_would_scale_is_passed_over_where_a_file_says_that_nothing_does(family: str) -> None:
    file = described(family)
    said = {"type": "none", "factor": 4.0, "original_context_length": 64}
    metadata = {**file.metadata, **{f"{file.architecture}.rope.scaling.{key}": value for key, value in said.items()}}
    assert FAMILIES[pico.shape(family).architecture].read(replace(file, metadata=metadata))["rope_scaling"] is None


def test_a_deepseek_that_says_nothing_is_scored_by_softmax_as_in_llama_cpp_but_for_glm() -> None:
    file = described("glm4-moe-lite")
    silent = {key: value for key, value in file.metadata.items() if "gating" not in key}
    tensors = {**file.tensors, "blk.1.exp_probs_b.bias": file.tensors["token_embd.weight"]}
    named = ["deepseek_v2", "deepseek_v3"]
    assert model_type_of(replace(file, tensors=tensors), named) == "deepseek_v3"
    assert model_type_of(replace(file, metadata=silent, tensors=tensors), named) == "deepseek_v2"
    flash = {"token_embd.weight": replace(file.tensors["token_embd.weight"], shape=(154880, 64))}
    of_47 = {**silent, "deepseek2.block_count": 47}
    assert model_type_of(replace(file, metadata=of_47, tensors=flash), named) == "deepseek_v3"


def test_lists_of_tokens_are_not_kept(tmp_path: Path) -> None:
    metadata = {"tokens": ["token"] * 100_000, "scores": [1.0] * 100_000}
    (tmp_path / "a.gguf").write_bytes(gguf_files.file(metadata, ONE))
    tracemalloc.start()
    head = read_head(tmp_path / "a.gguf")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert [each.length for each in head.metadata.values()] == [100_000, 100_000]


def test_the_page_lists_the_formats_and_architectures_that_are_read() -> None:
    page = (repository.DOCS / "gguf.md").read_text()
    named = set(re.findall(r"`([\w-]+)`", page))
    assert {form.name for form in FORMATS.values()} | set(UNREAD.values()) <= named
    assert {each for family in FAMILIES.values() for each in family.architectures} | FAMILIES.keys() <= named
