"""Hugging Face directories: what transformers wrote is read; what lies is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from safetensors.torch import load_file, save_file

from precisionctl.checkpoints.base import Companions, read_tensor, write_rows
from precisionctl.checkpoints.huggingface import INDEX, SINGLE, HuggingFaceReader, HuggingFaceWriter, recognise
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.safetensors_file import make_header, read_header
from precisionctl.errors import DamagedCheckpoint, PrecisionError, UnknownArchitecture, UnknownFormat
from precisionctl.param import TensorSpec
from precisionctl.plan import make_plan


@pytest.mark.parametrize("max_shard_size", ["5GB", "40KB"])
def test_every_tensor_reads_as_transformers_has_it(tmp_path: Path, max_shard_size: str) -> None:
    model = pico.save(tmp_path, "llama-3", dtype=torch.bfloat16, max_shard_size=max_shard_size)
    reader = HuggingFaceReader(tmp_path)
    expected = model.state_dict()
    assert set(reader.specs) == set(expected)
    for name, values in expected.items():
        assert torch.equal(read_tensor(reader, name), values)


def test_headers_are_those_of_the_library(tmp_path: Path) -> None:
    """Our header over the same tensors, read by the library, and the library's read by us."""
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(5, dtype=torch.bfloat16), "scalar": torch.tensor(3.0)}
    specs = {name: TensorSpec(tuple(values.shape), values.dtype) for name, values in tensors.items()}
    header, offsets = make_header(specs)
    body = bytearray(sum(spec.nbytes for spec in specs.values()))
    for name, values in tensors.items():
        data = bytes(values.contiguous().view(-1).view(torch.uint8).numpy())
        begin = offsets[name] - len(header)
        body[begin : begin + len(data)] = data
    ours = tmp_path / "ours.safetensors"
    ours.write_bytes(header + body)
    loaded = load_file(ours)
    assert all(torch.equal(loaded[name], values) for name, values in tensors.items())
    theirs = tmp_path / "theirs.safetensors"
    save_file(tensors, theirs)
    assert {name: stored.spec for name, stored in read_header(theirs).items()} == specs


def test_a_writer_gives_what_transformers_loads(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    model = pico.save(source, "mistral", dtype=torch.float16)
    reader = HuggingFaceReader(source)
    target.mkdir()
    writer = HuggingFaceWriter(target, reader.specs, reader.companions, {}, max_shard_size=30_000)
    writer.lay_out()
    for name, spec in reader.specs.items():
        write_rows(writer, name, 0, read_tensor(reader, name).reshape(spec.rows, spec.columns))
    writer.finish(None)
    assert (target / INDEX).is_file()
    loaded = type(model).from_pretrained(target, dtype=torch.float16)
    for name, values in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], values)


def test_laying_out_again_keeps_what_is_there(tmp_path: Path) -> None:
    specs = {"w": TensorSpec((2, 2), torch.float32)}
    writer = HuggingFaceWriter(tmp_path, specs, Companions(), {"model_type": "llama"})
    writer.lay_out()
    write_rows(writer, "w", 0, torch.ones(2, 2))
    writer.lay_out()
    assert torch.equal(load_file(tmp_path / SINGLE)["w"], torch.ones(2, 2))


def test_an_unknown_directory_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UnknownFormat, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)
    assert not recognise(tmp_path)


def edit_index(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / INDEX
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shard(directory: Path) -> Path:
    return sorted(directory.glob("*.safetensors"))[0]


def replace_header(directory: Path, header: bytes) -> None:
    shard(directory).write_bytes(len(header).to_bytes(8, "little") + header)


def lie(directory: Path, old: bytes, new: bytes) -> None:
    path = shard(directory)
    data = path.read_bytes()
    assert old in data and len(old) == len(new)
    path.write_bytes(data.replace(old, new, 1))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing shard": (lambda d: shard(d).unlink(), "shard .* is missing"),
    "a truncated file": (lambda d: shard(d).write_bytes(shard(d).read_bytes()[:-10]), "Truncated"),
    "an empty file": (lambda d: shard(d).write_bytes(b""), "truncated"),
    "a header length of 2**62": (lambda d: shard(d).write_bytes((2**62).to_bytes(8, "little") + b"{}"), "truncated"),
    "a path out of the directory": (
        lambda d: edit_index(d, lambda i: i["weight_map"].update(x="../../etc/passwd")),
        "not the name of a file",
    ),
    "a tensor that is elsewhere": (
        lambda d: edit_index(d, lambda i: i["weight_map"].update(x=shard(d).name)),
        "`x` is in .* but it is not",
    ),
    "an index without a map": (lambda d: edit_index(d, lambda i: i.clear()), "weight_map"),
    "a config that is no JSON": (lambda d: (d / "config.json").write_text("{"), "not readable as JSON"),
    "a config without sizes": (lambda d: (d / "config.json").write_text('{"model_type": "llama"}'), "no `num_hidden"),
    "sizes that are none": (lambda d: edit_config(d, num_attention_heads=0), "heads"),
    "a size that is a word": (
        lambda d: edit_config(d, num_hidden_layers="two"),
        "layers is 'two', not a size",
    ),
    "groups that do not divide": (lambda d: edit_config(d, num_key_value_heads=3), "4 heads in 3 query groups"),
    "a vocabulary of terabytes": (lambda d: edit_config(d, vocab_size=10**13), "vocab_size is 10000000000000"),
    "a number that is a word": (lambda d: edit_config(d, rms_norm_eps="abc"), "norm_epsilon is 'abc'"),
    "a base that is a word": (lambda d: edit_config(d, rope_parameters=None, rope_theta="abc"), "rope_theta is 'abc'"),
    "a base that is none": (
        lambda d: edit_config(d, rope_parameters={"rope_theta": float("nan")}),
        "rope_theta is nan",
    ),
    "a window that is a word": (
        lambda d: edit_config(d, model_type="mistral", sliding_window="x"),
        "sliding_window is 'x'",
    ),
    "a family that is a list": (lambda d: edit_config(d, model_type=["llama"]), "model_type is .'llama'., not a name"),
    "rotary parameters that are a list": (lambda d: edit_config(d, rope_parameters=[1]), "rotary parameters are"),
    "rotary scaling without its factor": (lambda d: edit_config(d, rope_parameters={"type": "linear"}), "no `factor`"),
    "quantisation that is a word": (lambda d: edit_config(d, quantization_config="abc"), "`quantization_config` is no"),
    "a map of lists": (lambda d: edit_index(d, lambda i: i["weight_map"].update(x=["y"])), "not the name of a file"),
    "a header too deep to parse": (lambda d: replace_header(d, b"[" * 100_000), "makes no sense"),
    "an unknown dtype": (lambda d: lie(d, b'"dtype":"BF16"', b'"dtype":"XX16"'), "makes no sense"),
    "a shape that lies": (lambda d: lie(d, b'"shape":[250,64]', b'"shape":[251,64]'), "bytes for BF16"),
    "offsets that overlap": (
        lambda d: lie(d, b'"data_offsets":[0,', b'"data_offsets":[2,'),
        "makes no sense|bytes for",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_error(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    pico.save(tmp_path, dtype=torch.bfloat16, max_shard_size="40KB")
    damage(tmp_path)
    with pytest.raises(DamagedCheckpoint, match=message):
        HuggingFaceReader(tmp_path)


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "an activation": {"hidden_act": "gelu"},
    "a scaling of no known kind": {"rope_parameters": {"rope_type": "spiral", "rope_theta": 10000.0, "factor": 4.0}},
    "half of the channels rotated": {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_model_that_would_become_another_one_is_refused(tmp_path: Path, name: str) -> None:
    pico.save(tmp_path)
    edit_config(tmp_path, **UNSUPPORTED[name])
    with pytest.raises(UnknownArchitecture, match="no llama known here|rotary scaling of type"):
        HuggingFaceReader(tmp_path)


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "default"}])
def test_rotary_scaling_that_both_sides_have_is_read(tmp_path: Path, scaling: dict[str, Any]) -> None:
    pico.save(tmp_path)
    edit_config(tmp_path, rope_parameters={**scaling, "rope_theta": 10000.0})
    assert HuggingFaceReader(tmp_path).model.rope_scaling == (scaling if "factor" in scaling else None)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int8, torch.float64])
def test_numbers_that_are_no_values_are_not_taken_for_some(tmp_path: Path, dtype: torch.dtype) -> None:
    pico.save(tmp_path)
    stored = load_file(tmp_path / SINGLE)
    save_file({name: v.to(dtype) if "proj" in name else v for name, v in stored.items()}, tmp_path / SINGLE)
    with pytest.raises(PrecisionError, match=f"q_proj.weight` is {str(dtype).removeprefix('torch.')}"):
        make_plan(HuggingFaceReader(tmp_path), "megatron")
