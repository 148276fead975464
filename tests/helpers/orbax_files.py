"""Checkpoints as Orbax writes them, without it: zarr's arrays in OCDBT or in files. tests/peers shows that TensorStore
and Orbax read them."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from precisionctl.checkpoints.orbax.crc32c import crc32c

Entries = dict[str, bytes]
State = dict[str, Tensor]


def compressed(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=1).compress(data)


def plain(data: bytes) -> bytes:
    return data


def write(
    item: Path,
    arrays: Mapping[str, Tensor],
    *,
    form: int = 3,
    ocdbt: bool = True,
    zstd: bool = False,
    parts: int = 2,
    sharded: bool = True,
    **settings: Any,
) -> Path:
    """Write the arrays, by names with dots. Each dimension is cut into `parts`, shards into `parts` chunks again."""
    pack = compressed if zstd else plain
    entries: Entries = {}
    for name, tensor in arrays.items():
        entries |= (_format_3 if form == 3 else _format_2)(name, tensor, parts, sharded, pack)
    item.mkdir(parents=True, exist_ok=True)
    if ocdbt:
        write_store(item, entries, zstd=zstd)
    else:
        for key, value in entries.items():
            (item / key).parent.mkdir(parents=True, exist_ok=True)
            (item / key).write_bytes(value)
    leaves = {str(tuple(name.split("."))): _leaf(name) for name in arrays}
    if any(name.startswith("opt_state.0.") for name in arrays):
        leaves["('opt_state', '1')"] = _leaf("opt_state.1", value_type="None", skip_deserialize=True)
    about = {"tree_metadata": leaves, "store_array_data_equal_to_fill_value": True, **settings}
    (item / "_METADATA").write_text(json.dumps(about))
    return item


def _leaf(name: str, *, value_type: str = "jax.Array", skip_deserialize: bool = False) -> dict[str, Any]:
    keys = [{"key": key, "key_type": 2} for key in name.split(".")]
    return {
        "key_metadata": keys,
        "value_metadata": {"value_type": value_type, "skip_deserialize": skip_deserialize},
    }


def _cut(tensor: Tensor, size: list[int]) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The boxes of a grid, those at the ends filled up."""
    grid = [range(-(-whole // part)) for whole, part in zip(tensor.shape, size, strict=True)]
    for at in itertools.product(*grid):
        box = tensor[tuple(slice(i * part, (i + 1) * part) for i, part in zip(at, size, strict=True))]
        whole = torch.zeros(size, dtype=tensor.dtype)
        whole[tuple(map(slice, box.shape))] = box
        yield at, whole


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _format_3(name: str, tensor: Tensor, parts: int, sharded: bool, pack: Callable[[bytes], bytes]) -> Entries:
    codecs: list[Any] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if pack is compressed:
        codecs.append({"name": "zstd", "configuration": {"level": 3, "checksum": False}})
    shard = [-(-size // parts) for size in tensor.shape]
    chunk = [size // parts if size % parts == 0 else size for size in shard]
    index = [codecs[0], {"name": "crc32c"}]
    outer = [
        {
            "name": "sharding_indexed",
            "configuration": {"chunk_shape": chunk, "codecs": codecs, "index_codecs": index},
        }
    ]
    about = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(tensor.shape),
        "data_type": str(tensor.dtype).removeprefix("torch."),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0.0 if tensor.dtype.is_floating_point else 0,
        "codecs": outer if sharded else codecs,
    }
    found = {f"{name}/zarr.json": json.dumps(about).encode()}
    for at, box in _cut(tensor, shard):
        key = "/".join((name, "c", *map(str, at)))
        found[key] = _shard(box, chunk, pack) if sharded else pack(_bytes(box))
    return found


def _shard(box: Tensor, chunk: list[int], pack: Callable[[bytes], bytes]) -> bytes:
    data, index = b"", b""
    for _, one in _cut(box, chunk):
        stored = pack(_bytes(one))
        index += len(data).to_bytes(8, "little") + len(stored).to_bytes(8, "little")
        data += stored
    return data + index + crc32c(index).to_bytes(4, "little")


def _format_2(name: str, tensor: Tensor, parts: int, sharded: bool, pack: Callable[[bytes], bytes]) -> Entries:
    chunk = [-(-size // parts) for size in tensor.shape]
    kinds = {torch.float32: "<f4", torch.int32: "<i4", torch.float16: "<f2", torch.bfloat16: "bfloat16"}
    about = {
        "zarr_format": 2,
        "shape": list(tensor.shape),
        "chunks": chunk,
        "dtype": kinds[tensor.dtype],
        "compressor": {"id": "zstd", "level": 1} if pack is compressed else None,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "dimension_separator": ".",
    }
    found = {f"{name}/.zarray": json.dumps(about).encode()}
    for at, box in _cut(tensor, chunk):
        found[f"{name}/{'.'.join(map(str, at)) or '0'}"] = pack(_bytes(box))
    return found


def number(value: int) -> bytes:
    """In LEB128."""
    found = bytearray()
    while True:
        found.append(value & 0x7F | (0x80 if value > 0x7F else 0))
        value >>= 7
        if not value:
            return bytes(found)


def numbers(*values: int) -> bytes:
    return b"".join(map(number, values))


def node(magic: int, body: bytes, zstd: bool = False) -> bytes:
    """A node or a manifest, with header and checksum."""
    stored = compressed(body) if zstd else body
    data = magic.to_bytes(4, "big") + (len(stored) + 18).to_bytes(8, "little") + bytes((0, int(zstd))) + stored
    return data + crc32c(data).to_bytes(4, "little")


def names(keys: list[bytes], *between: int) -> bytes:
    """Names, each without what it has in common with the one before."""
    common = [0] if keys else []
    for last, key in itertools.pairwise(keys):
        same = (i for i, (a, b) in enumerate(zip(last, key, strict=False)) if a != b)
        common.append(next(same, min(len(last), len(key))))
    rests = [key[shared:] for key, shared in zip(keys, common, strict=True)]
    return numbers(*common[1:]) + numbers(*map(len, rests)) + numbers(*between) + b"".join(rests)


def table(*files: str) -> bytes:
    """Data files; what is before `d/` is the base of the paths in them."""
    bases = [file.rpartition("d/")[0] for file in files]
    return number(len(files)) + names([file.encode() for file in files], *map(len, bases))


def leaf(entries: Mapping[bytes, bytes | tuple[int, int]], *files: str) -> bytes:
    """The body of a leaf. A value is itself, or an offset in the first file and a length."""
    values = list(entries.values())
    sizes = [one[1] if isinstance(one, tuple) else len(one) for one in values]
    outside = [one for one in values if isinstance(one, tuple)]
    return b"".join(
        (
            bytes((0,)),
            table(*files),
            number(len(entries)),
            names(list(entries)),
            numbers(*sizes),
            numbers(*(int(isinstance(one, tuple)) for one in values)),
            numbers(*(0 for _ in outside)),
            numbers(*(offset for offset, _ in outside)),
            *(one for one in values if isinstance(one, bytes)),
        )
    )


def above(children: Mapping[bytes, tuple[int, int]], *files: str, height: int = 1, common: int = 0) -> bytes:
    """The body of a node above others: for each its first key, and where it is in the first file."""
    places = list(children.values())
    return b"".join(
        (
            bytes((height,)),
            table(*files),
            number(len(children)),
            names([key[common:] if key else key for key in children], *(0 for _ in children)),
            numbers(*(0 for _ in children)),
            numbers(*(offset for offset, _ in places)),
            numbers(*(length for _, length in places)),
            numbers(*(1 for _ in range(3 * len(children)))),
        )
    )


def manifest(root: tuple[int, int], file: str, *, height: int = 1, keys: int = 1, zstd: bool = False) -> bytes:
    config = bytes(16) + numbers(0, 100, 1 << 23) + bytes((4,)) + (number(1) + bytes(4) if zstd else number(0))
    version = number(1) + number(1) + bytes((height,)) + numbers(0, *root, keys, 1, 1) + bytes(8)
    return node(0x0CDB3A2A, config + table(file) + version + number(0), zstd)


def write_store(item: Path, entries: Mapping[str, bytes], *, zstd: bool = False) -> None:
    """An OCDBT of two leaves: the values and the leaves in one data file, the root in another."""
    keys = sorted(entries, key=str.encode)
    data, leaves = b"", dict[bytes, tuple[int, int]]()
    for part in (keys[: len(keys) // 2], keys[len(keys) // 2 :]):
        found: dict[bytes, bytes | tuple[int, int]] = {}
        for key in part:
            value = entries[key]
            found[key.encode()] = value if len(value) <= 100 else (len(data), len(value))
            data += value if len(value) > 100 else b""
        if found:
            made = node(0x0CDB20DE, leaf(found, "d/values"), zstd)
            leaves[part[0].encode()] = len(data), len(made)
            data += made
    (item / "d").mkdir(exist_ok=True)
    (item / "ocdbt.process_0" / "d").mkdir(parents=True, exist_ok=True)
    (item / "ocdbt.process_0" / "d" / "values").write_bytes(data)
    root = node(0x0CDB20DE, above(leaves, "ocdbt.process_0/d/values"), zstd)
    (item / "d" / "root").write_bytes(root)
    (item / "manifest.ocdbt").write_bytes(manifest((0, len(root)), "d/root", keys=len(keys), zstd=zstd))
