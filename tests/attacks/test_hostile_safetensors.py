"""Headers of safetensors files that lie: each is one short error, whatever it claims, and nothing is made as large."""

import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from command_line import run
from safetensors.torch import save_file

from precisionctl.checkpoints.hf_directory.safetensors_file import read_header
from precisionctl.errors import DamagedCheckpoint, NotUnderstood, UnmappedTensor
from precisionctl.planning.checks import check_names

SOUND = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
ANOTHER = {"dtype": "U8", "shape": [8], "data_offsets": [24, 32]}
SURROGATE = json.loads('"\\ud800"')


def file_of(header: str | bytes | Mapping[str, Any], data: bytes = bytes(24), length: int | None = None) -> bytes:
    text = json.dumps(header).encode() if isinstance(header, Mapping) else header
    text = text.encode() if isinstance(text, str) else text
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def said(**fields: Any) -> bytes:
    """A file of one tensor, of which something else is said."""
    return file_of({"a": {**SOUND, **fields}})


LIES: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": b"\1\0\0\0\0\0\0",
    "a header of 100 GB": file_of("{}", b"", 100 << 30),
    "a header of 2**64": file_of("{}", b"", (1 << 64) - 1),
    "a header longer than the file": file_of({"a": SOUND}, b"", 1000),
    "a header of no bytes": file_of("", b""),
    "no JSON": file_of("x" * 40),
    "no UTF-8": file_of(b'{"\xff": 1}'),
    "UTF-16": file_of(json.dumps({"a": SOUND}).encode("utf-16")),
    "a byte order mark": file_of(b"\xef\xbb\xbf" + json.dumps({"a": SOUND}).encode()),
    "a space before it": file_of(" " + json.dumps({"a": SOUND})),
    "a list": file_of("[]", b""),
    "a hundred thousand brackets": file_of('{"a":' + "[" * 100_000, b""),
    "a number of a million digits": file_of('{"a":' + "9" * 1_000_000 + "}", b""),
    "a name that is half a letter": file_of({SURROGATE: SOUND}),
    "a name of five thousand digits": file_of({"9" * 5000: SOUND}),
    "a tensor twice": file_of(json.dumps({"a": SOUND, "b": SOUND}).replace('"b"', '"a"')),
    "a dtype twice": file_of('{"a":{"dtype":"F32","dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'),
    "metadata that is a list": file_of({"__metadata__": [], "a": SOUND}),
    "metadata that is a number": file_of({"__metadata__": {"format": 1}, "a": SOUND}),
    "metadata within metadata": file_of({"__metadata__": {"format": {}}, "a": SOUND}),
    "a tensor that is a list": file_of({"a": [1, 2, 3]}),
    "a tensor that is null": file_of({"a": None}),
    "no shape": file_of({"a": {"dtype": "F32", "data_offsets": [0, 24]}}),
    "something besides": said(more=1),
    "an unknown dtype": said(dtype="F128"),
    "a dtype that is a list": said(dtype=["F32"]),
    "a dtype of a megabyte": said(dtype="F" * 1_000_000),
    "a negative size": said(shape=[-2, -3]),
    "a negative zero": file_of('{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[-0,24]}}'),
    "a size of 2**64": said(shape=[1 << 64, 0]),
    "a size that is true": said(shape=[6, True]),
    "a size with a fraction": said(shape=[2.0, 3]),
    "a size that is no number": said(shape=[float("nan"), 3]),
    "a size that is a word": said(shape=["2", 3]),
    "a shape that is a word": said(shape="", data_offsets=[0, 4]),
    "a shape that is a table": said(shape={}, data_offsets=[0, 4]),
    "a hundred thousand dimensions": said(shape=[1 << 62] * 100_000),
    "more elements than bytes": said(shape=[1 << 40, 1 << 40]),
    "fewer bytes than elements": said(data_offsets=[0, 20]),
    "an end before its begin": said(data_offsets=[24, 0]),
    "one offset": said(data_offsets=[0]),
    "three offsets": said(data_offsets=[0, 24, 24]),
    "past the end": said(data_offsets=[24, 48]),
    "a hole before it": said(shape=[5], data_offsets=[4, 24]),
    "a hole behind it": file_of({"a": SOUND}, bytes(32)),
    "an overlap": file_of({"a": SOUND, "b": ANOTHER | {"data_offsets": [20, 28]}}, bytes(28)),
    "one in the other": file_of({"a": SOUND, "b": ANOTHER | {"data_offsets": [0, 8]}}),
    "a file cut short": file_of({"a": SOUND}, bytes(20)),
}


STRICTER = ("a space before it", "a name of five thousand digits", "a tensor twice", "something besides")
"""What the library lets pass: of a name that is there twice it takes the last."""


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_damage_and_the_library_refuses_it_too(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(LIES[name])
    tracemalloc.start()
    with pytest.raises(DamagedCheckpoint) as error:
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(str(error.value)) < 5000
    assert peak < (10 << 20) + 30 * len(LIES[name])
    if name not in STRICTER:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(LIES[name])


def test_what_the_lies_are_about_is_read_when_it_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of({"__metadata__": {"format": "pt"}, "a": SOUND, "b": ANOTHER}, bytes(32)))
    assert {name: (stored.spec.shape, stored.offset) for name, stored in read_header(path).items()} == {
        "a": ((2, 3), path.stat().st_size - 32),
        "b": ((8,), path.stat().st_size - 8),
    }


def piece_at(said: str) -> bytes:
    return file_of({"__metadata__": {"format": "pt", "DCP_SHARDING_INFO": said}, "a": SOUND})


OFFSETS_THAT_LIE = {
    "no JSON": "x",
    "half a letter": '{"a": {"saved_offsets": [0, 0], "\ud800": 0}}',
    "a list": "[]",
    "nothing": "{}",
    "another tensor's": '{"b": {"saved_offsets": [0, 0]}}',
    "another tensor's too": '{"a": {"saved_offsets": [0, 0]}, "b": {"saved_offsets": [0]}}',
    "twice": '{"a": {"saved_offsets": [0, 0]}, "a": {"saved_offsets": [2, 0]}}',
    "no offsets": '{"a": {}}',
    "a number": '{"a": 0}',
    "a word": '{"a": {"saved_offsets": "00"}}',
    "one dimension": '{"a": {"saved_offsets": [0]}}',
    "three dimensions": '{"a": {"saved_offsets": [0, 0, 0]}}',
    "a hundred thousand dimensions": f'{{"a": {{"saved_offsets": {[0] * 100_000}}}}}',
    "before the beginning": '{"a": {"saved_offsets": [-2, 0]}}',
    "a fraction": '{"a": {"saved_offsets": [0.0, 0]}}',
    "no number": '{"a": {"saved_offsets": [NaN, 0]}}',
    "true": '{"a": {"saved_offsets": [false, 0]}}',
    "2**64": '{"a": {"saved_offsets": [18446744073709551616, 0]}}',
    "a million digits": f'{{"a": {{"saved_offsets": [{"9" * 1_000_000}, 0]}}}}',
    "a hundred thousand brackets": '{"a":' + "[" * 100_000,
    "ten million of them": '{"a":[' + "[]," * 10_000_000 + "0]}",
    "a piece": '{"a": {"saved_offsets": [2, 0]}}',
}


@pytest.mark.parametrize("name", OFFSETS_THAT_LIE)
def test_a_piece_is_no_tensor_and_what_says_so_is_no_easier_to_lie_in(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file := piece_at(OFFSETS_THAT_LIE[name]))
    tracemalloc.start()
    with pytest.raises(DamagedCheckpoint, match="a piece, at" if name == "a piece" else "DCP_SHARDING_INFO|makes no"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (10 << 20) + 30 * len(file)
    path.write_bytes(piece_at('{"a": {"saved_offsets": [0, 0]}}'))
    assert read_header(path).keys() == {"a"}


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
def test_a_dtype_of_the_format_that_is_not_read_is_no_damage(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(said(dtype=dtype))
    with pytest.raises(NotUnderstood, match=f"tensors of dtype {dtype} are not converted .*model.safetensors"):
        read_header(path)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.complex64])
def test_whatever_dtype_pytorch_saves_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"a": torch.zeros(2, 3).to(dtype)}, tmp_path / "model.safetensors")
    (found,) = read_header(tmp_path / "model.safetensors").values()
    assert (found.spec.dtype.torch, found.spec.shape) == (dtype, (2, 3))


def test_a_header_of_a_hundred_megabytes_of_brackets_is_not_parsed(tmp_path: Path) -> None:
    """It would be gigabytes of lists."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of('{"a":[' + "[]," * 30_000_000 + "0]}", b""))
    tracemalloc.start()
    with pytest.raises(DamagedCheckpoint):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 300 << 20
    tracemalloc.stop()


def test_what_an_error_says_cannot_move_the_cursor(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(said(dtype="\x1b[2J\x1b]0;title\x07\u202e"))
    with pytest.raises(DamagedCheckpoint) as error:
        read_header(path)
    assert str(error.value).isprintable()


FORGED = "The same: all 2 tensors."


@pytest.mark.parametrize("command", ["inspect", "convert", "verify"])
def test_no_name_of_a_tensor_makes_a_line_that_passes_for_ours(tmp_path: Path, command: str) -> None:
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    stored = {f"a\n{FORGED}\nb.weight": torch.ones(32, 32), "c.weight": torch.ones(32, 32)}
    for directory, tensors in ((a, stored), (b, {name: one + 1 for name, one in stored.items()})):
        directory.mkdir()
        save_file(tensors, directory / "model.safetensors")
        (directory / "config.json").write_text('{"model_type": "of no table"}')
    arguments = {"inspect": [a], "convert": [a, out, "--to", "hf", "--dry-run"], "verify": [a, b]}
    printed = run(command, *arguments[command]).output
    assert "c.weight" in printed
    assert not [line for line in printed.splitlines() if line.strip() == FORGED]


def test_names_that_an_error_lists_are_a_line_each() -> None:
    with pytest.raises(UnmappedTensor) as error:
        check_names([], [f"a\n{FORGED}\nb.weight"])
    assert len(error.value.what.splitlines()) == 2
