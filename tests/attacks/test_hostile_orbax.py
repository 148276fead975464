"""OCDBT and zarr that lie: one error each, and soon."""

import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orbax_files
import pytest
import torch
from orbax_files import above, leaf, manifest, names, node, number, numbers, table

from precisionctl.checkpoints.orbax.decoded_chunks import DecodedChunks
from precisionctl.checkpoints.orbax.ocdbt import read_keys
from precisionctl.checkpoints.orbax.step_directory import item_directory, read_tree
from precisionctl.errors import CheckpointError, DamagedCheckpoint

NODE = 0x0CDB20DE
VALUES = {"a": torch.arange(12.0).reshape(3, 4), "step": torch.tensor(7, dtype=torch.int32)}


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """The time is the processor's: others may keep it busy."""
    began = time.process_time()
    yield
    assert time.process_time() - began < 5


def store(item: Path, root: bytes, *, height: int = 0, zstd: bool = False, **beside: bytes) -> Path:
    """A store whose root is this body, in `d/root`."""
    (item / "d").mkdir(parents=True)
    made = node(NODE, root, zstd)
    for name, data in {"root": made, **beside}.items():
        (item / "d" / name).write_bytes(data)
    (item / "manifest.ocdbt").write_bytes(manifest((0, len(made)), "d/root", height=height))
    return item


def test_any_changed_byte_of_the_index_is_found(tmp_path: Path) -> None:
    orbax_files.write(tmp_path, VALUES)
    for file in ("manifest.ocdbt", "d/root"):
        whole = (tmp_path / file).read_bytes()
        for at in range(len(whole)):
            (tmp_path / file).write_bytes(whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :])
            with pytest.raises(DamagedCheckpoint):
                read_keys(tmp_path)
        (tmp_path / file).write_bytes(whole[:-1])
        with pytest.raises(DamagedCheckpoint):
            read_keys(tmp_path)
        (tmp_path / file).write_bytes(whole)
    assert len(read_keys(tmp_path)) == len(VALUES) * 2 + 3


CHILD = node(NODE, leaf({b"a": b"1"}))
LONG = b"a" * 60_000
BOMB = bytes((0,)) + number(0) + number(30_000)
BOMB += numbers(*(60_000 for _ in range(29_999)), 60_000, *(0 for _ in range(29_999))) + LONG

ROOTS: dict[str, tuple[bytes, int, str]] = {
    "a path above": (leaf({b"a": (0, 1)}, "../../secret"), 0, "a file '../../secret'"),
    "a path in other words": (leaf({b"a": (0, 1)}, "d/.//root"), 0, "a file 'd/.//root'"),
    "an absolute path": (leaf({b"a": (0, 1)}, "/etc/passwd"), 0, "a file '/etc/passwd'"),
    "a link that leads out": (leaf({b"a": (0, 1)}, "d/link"), 0, "leads out"),
    "no such file": (leaf({b"a": (0, 1)}, "d/none"), 0, "missing"),
    "bytes behind a file's end": (leaf({b"a": (1 << 62, 1 << 62)}, "d/root"), 0, "are needed"),
    "no such data file": (leaf({b"a": (0, 1)}), 0, "data file 0 of 0"),
    "itself below it": (above({b"": (0, 37)}, "d/root"), 1, "two references"),
    "one node twice": (above({b"": (0, len(CHILD)), b"b": (0, len(CHILD))}, "d/child"), 1, "two references"),
    "a node of another height": (above({b"": (0, len(CHILD))}, "d/child", height=2), 2, "it is of height 0"),
    "keys that go back": (leaf({b"b": b"", b"a": b""}), 0, "do not follow each other"),
    "a key that is no text": (leaf({b"\xff": b""}), 0, "no text"),
    "no entries": (bytes((0,)) + table() + number(0), 0, "no entries"),
    "more keys than any model": (bytes((0,)) + table() + number(1 << 60), 0, "keys and data files"),
    "more data files than any model": (bytes((0,)) + number(1 << 60), 0, "keys and data files"),
    "more keys than bytes": (bytes((0,)) + table() + number(1 << 9), 0, "ends inside a number"),
    "a number without end": (bytes((0,)) + b"\x80" * 12, 0, "more than 64 bits"),
    "names of many bytes": (BOMB, 0, "names of more than"),
    "a name longer than the one before": (
        bytes((0,)) + number(0) + numbers(2, 5, 0, 1),
        0,
        "has 5 bytes of one",
    ),
    "another kind of value": (bytes((0,)) + number(0) + number(1) + names([b"a"]) + numbers(0, 2), 0, "kinds"),
    "bytes behind its end": (leaf({b"a": b""}) + b"?", 0, "behind its end"),
}


@pytest.mark.parametrize("root", ROOTS)
def test_a_node_that_lies_has_one_error(tmp_path: Path, root: str) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    body, height, words = ROOTS[root]
    item = store(tmp_path / "item", body, height=height, child=CHILD)
    (item / "d" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(DamagedCheckpoint, match=words):
        read_keys(item)


def test_a_link_to_another_state_is_not_followed(tmp_path: Path) -> None:
    orbax_files.write(tmp_path / "other", VALUES)
    (tmp_path / "steps" / "3").mkdir(parents=True)
    (tmp_path / "steps" / "3" / "items").symlink_to(tmp_path / "other")
    with pytest.raises(DamagedCheckpoint, match="leads out"):
        item_directory(tmp_path / "steps", None)


def described(**changes: Any) -> Callable[[Path], None]:
    """Change the description of `a`; None takes a key away."""

    def change(item: Path) -> None:
        file = item / "a" / "zarr.json"
        about = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in about.items() if value is not None}))

    return change


def grid(*shape: int) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(shape)}}


def shards(*chunk: int) -> list[Any]:
    inside = {"chunk_shape": list(chunk), "codecs": [{"name": "bytes"}]}
    return [
        {
            "name": "sharding_indexed",
            "configuration": inside | {"index_codecs": [{"name": "bytes"}, {"name": "crc32c"}]},
        }
    ]


ARRAYS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a chunk that is missing": (lambda item: (item / "a/c/1/1").unlink(), "a part of `a` is missing"),
    "a chunk too short": (lambda item: (item / "a/c/1/1").write_bytes(b"123"), "another size"),
    "a chunk too long": (lambda item: (item / "a/c/1/1").write_bytes(bytes(99)), "another size"),
    "an array that is missing": (lambda item: (item / "a/zarr.json").unlink(), "`a` is in _METADATA"),
    "another codec": (described(codecs=[{"name": "bytes"}, {"name": "blosc"}]), r"codecs \['bytes', 'blosc'\]"),
    "another order": (described(codecs=[{"name": "transpose"}, {"name": "bytes"}]), "codecs"),
    "another dtype": (described(data_type="int4"), "dtype 'int4'"),
    "another version": (described(zarr_format=4), "zarr_format 4"),
    "no shape": (described(shape=None), "not the description of an array"),
    "a size below zero": (described(shape=[-3, 4]), "as sizes"),
    "a size of zero": (described(shape=[0, 4]), "an array"),
    "a dimension more": (described(shape=[3, 4, 5]), "an array"),
    "chunks without number": (described(shape=[1 << 40, 4]), "chunks"),
    "chunks larger than it": (described(chunk_grid=grid(2, 5)), r"larger than the array \(3, 4\)"),
    "a size that no disk has": (described(shape=[1 << 50, 4], chunk_grid=grid(1 << 49, 2)), "as no model has"),
    "a shard of many chunks": (
        described(shape=[1 << 20, 4], chunk_grid=grid(1 << 20, 4), codecs=shards(1, 1)),
        "4194304 chunks in a shard",
    ),
    "chunks of another shape": (described(chunk_grid=grid(1, 1)), "a part of `a` is missing|another size"),
}


@pytest.mark.parametrize("array", ARRAYS)
def test_an_array_that_lies_has_one_error(tmp_path: Path, array: str) -> None:
    orbax_files.write(tmp_path, VALUES, ocdbt=False, sharded=False)
    change, words = ARRAYS[array]
    change(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        read_all(tmp_path)


def read_all(item: Path) -> None:
    arrays, _ = read_tree(item)
    decoded = DecodedChunks(arrays.values())
    for array in arrays.values():
        decoded.read(array, [range(size) for size in array.shape])


def test_an_index_of_a_shard_that_lies_has_one_error(tmp_path: Path) -> None:
    orbax_files.write(tmp_path, VALUES, ocdbt=False)
    shard = tmp_path / "a" / "c" / "0" / "0"
    whole = shard.read_bytes()
    for at in range(len(whole) - 20, len(whole)):
        shard.write_bytes(whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :])
        with pytest.raises(DamagedCheckpoint, match="checksum of its index"):
            read_all(tmp_path)
    shard.write_bytes(whole[-19:])
    with pytest.raises(DamagedCheckpoint, match="not a shard of zarr"):
        read_all(tmp_path)


@pytest.mark.parametrize("stored", ["zeros", "no end", "no Zstandard"])
def test_what_is_compressed_is_no_larger_than_it_says(tmp_path: Path, stored: str) -> None:
    pytest.importorskip("zstandard")
    orbax_files.write(tmp_path, VALUES, ocdbt=False, sharded=False, zstd=True)
    chunk = tmp_path / "a" / "c" / "0" / "0"
    data = {
        "zeros": orbax_files.compressed(bytes(1 << 28)),
        "no end": chunk.read_bytes()[:-3],
        "no Zstandard": b"?" * 9,
    }
    chunk.write_bytes(data[stored])
    with pytest.raises(DamagedCheckpoint, match="another size|not what Zstandard writes"):
        read_all(tmp_path)


def test_chunks_are_little_larger_than_their_array(tmp_path: Path) -> None:
    orbax_files.write(tmp_path, {"a": torch.ones([3] * 8)}, sharded=False)  # in chunks of [2] * 8: 10 times its bytes
    with pytest.raises(DamagedCheckpoint, match="as no model has"):
        read_all(tmp_path)


@pytest.mark.parametrize("named", ["keys", "data files"])
def test_a_node_of_zeros_is_not_made_objects_of(tmp_path: Path, named: str) -> None:
    pytest.importorskip("zstandard")
    before = bytes((0,)) + (number(0) if named == "keys" else b"") + number(1 << 23)
    item = store(tmp_path / "item", before + bytes(31 << 20), zstd=True)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedCheckpoint, match="keys and data files"):
            read_keys(item)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_nodes_are_bounded_together(tmp_path: Path) -> None:
    children, data = dict[bytes, tuple[int, int]](), b""
    for i in range(1 << 12):
        made = node(NODE, leaf({b"%04d" % i: b""}))
        children[b"%04d" % i] = len(data), len(made)
        data += made
    item = store(tmp_path / "many", above(children, "d/below"), height=1, below=data)
    with pytest.raises(DamagedCheckpoint, match="more than 4096 nodes"):
        read_keys(item)
    with open(item / "manifest.ocdbt", "r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(DamagedCheckpoint, match="or 16777216 bytes of them"):
        read_keys(item)


def test_a_long_beginning_of_many_keys_counts_for_each(tmp_path: Path) -> None:
    long = b"a" * 60_000
    below = node(NODE, leaf({b"%04d" % i: b"" for i in range(2000)}))
    children = {long: (0, len(below))}
    root = above(children, "d/below").replace(bytes(1) + long, number(len(long)) + long)
    item = store(tmp_path / "item", root, height=1, below=below)
    with pytest.raises(DamagedCheckpoint, match="names of more than"):
        read_keys(item)


def test_one_description_is_not_read_for_many_arrays(tmp_path: Path) -> None:
    item = store(tmp_path / "item", leaf({b"%04d/zarr.json" % i: (0, 1 << 20) for i in range(40)}, "d/values"))
    about = json.dumps({"node_type": "group"}).encode()
    (item / "d" / "values").write_bytes(about + b" " * ((1 << 20) - len(about)))
    with pytest.raises(DamagedCheckpoint, match="more than 33554432 of all arrays"):
        read_tree(item)


def test_a_node_is_no_larger_than_any(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    (tmp_path / "manifest.ocdbt").write_bytes(node(0x0CDB3A2A, bytes(1 << 28), zstd=True))
    with pytest.raises(DamagedCheckpoint, match="as nothing of its kind has"):
        read_keys(tmp_path)
