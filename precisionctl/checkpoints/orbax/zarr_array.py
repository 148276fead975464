"""Arrays in zarr's formats 2 and 3, as TensorStore writes them for Orbax: which keys their chunks have.

A chunk is the row-major bytes of a box of the array, compressed with Zstandard or not at all. The boxes at an array's
ends are as large as all others. Format 3 may pack chunks into shards, at the end of which an index says where each is,
with a CRC-32C (zarr-specs, v2/v2.0.rst, v3/core and v3/codecs/sharding-indexed). What else the formats have (other
codecs, orders of dimensions and of bytes) is refused by name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from precisionctl.checkpoints.orbax.crc32c import crc32c
from precisionctl.checkpoints.orbax.zstd_pieces import Value
from precisionctl.checkpoints.torch_files.torch_zip import Span
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, DamagedCheckpoint, damage, shown
from precisionctl.untrusted.safe_json import parse_json
from precisionctl.untrusted.safe_pickle import sizes

ABOUT_2, ABOUT_3 = "/.zarray", "/zarr.json"
_LARGEST_ABOUT, _MOST_ABOUT = 1 << 20, 32 << 20
"""Bytes of an array's description, and of all: Orbax's have 1 kB, and many keys may say the same bytes."""
_MOST_CHUNKS, _MOST_IN_SHARD = 1 << 24, 1 << 18
_ABSENT = (1 << 64) - 1
"""The offset and the length in a shard's index of a chunk that is not there."""
_DTYPES_2 = {
    **{f"<f{dtype.itemsize}": dtype for dtype in (DType.float64, DType.float32, DType.float16)},
    **{f"<i{dtype.itemsize}": dtype for dtype in (DType.int64, DType.int32, DType.int16)},
    **{f"<u{dtype.itemsize}": dtype for dtype in (DType.uint64, DType.uint32, DType.uint16)},
    "|i1": DType.int8,
    "|u1": DType.uint8,
    "|b1": DType.bool,
    "bfloat16": DType.bfloat16,
}
"""What format 2 calls dtypes. Format 3, and 2 for FP8, have the same names as we."""


@dataclass(frozen=True)
class ZarrArray:
    """An array of `shape` in a `grid` of chunks of the shape `chunk`, which are in shards of the shape `shard` if it is
    `sharded`. A key is `prefix` and the place in the grid. `filled` says that a chunk may be missing, and is zeros
    then. Raises ValueError for shapes that contradict each other, and chunks or shards that are larger than the array:
    TensorStore and Orbax make none."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    chunk: tuple[int, ...]
    shard: tuple[int, ...]
    sharded: bool
    compressed: bool
    prefix: str
    separator: str
    values: Mapping[str, Value]
    filled: bool
    _indexes: dict[str, bytes] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        chunk, shard = self.chunk, self.shard
        if not len(self.shape) == len(chunk) == len(shard) or 0 in (*self.shape, *chunk, *shard):
            raise ValueError(f"an array {shown(self.shape)} in chunks {shown(chunk)}, in shards {shown(shard)}")
        if any(whole % part for whole, part in zip(shard, chunk, strict=True)):
            raise ValueError(f"chunks {shown(chunk)} in shards {shown(shard)}")
        if any(part > size for size, part in zip(self.shape, shard, strict=True)):
            raise ValueError(f"chunks {shown(shard)}, larger than the array {shown(self.shape)}")
        if (count := math.prod(shard) // math.prod(chunk)) > _MOST_IN_SHARD:
            raise ValueError(f"{count} chunks in a shard")
        if math.prod(self.grid) > _MOST_CHUNKS:
            raise ValueError(f"{math.prod(self.grid)} chunks")

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(-(-size // part) for size, part in zip(self.shape, self.chunk, strict=True))

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk) * self.dtype.itemsize

    @property
    def shards(self) -> Iterator[str]:
        """The keys of all shards."""
        counts = (-(-size // part) for size, part in zip(self.shape, self.shard, strict=True))
        return map(self._key, itertools.product(*map(range, counts)))

    def place(self, at: tuple[int, ...]) -> Value | None:
        """Where the chunk at a place in the grid is; None where it is zeros. Raises DamagedCheckpoint where it is
        missing, and for a shard's index that contradicts its checksum or the shard."""
        key = self._key(tuple(i * part // whole for i, part, whole in zip(at, self.chunk, self.shard, strict=True)))
        value = self.values.get(key)
        if value is not None and self.sharded:
            value = self._in_shard(key, value, at)
        if value is None and not self.filled:
            what = f"the chunk {list(at)} of `{self.name}` is missing"
            raise DamagedCheckpoint(what, where=key, do="Is the copy whole?")
        return value

    def _key(self, shard: tuple[int, ...]) -> str:
        return self.prefix + self.separator.join(map(str, shard))

    def _in_shard(self, key: str, value: Value, at: tuple[int, ...]) -> Value | None:
        counts = tuple(whole // part for whole, part in zip(self.shard, self.chunk, strict=True))
        with damage(f"not a shard of zarr, of `{self.name}`", value if isinstance(value, Span) else key):
            if key not in self._indexes:
                length = 16 * math.prod(counts) + 4
                index = _part(value, _length(value) - length, length)
                stored = index if isinstance(index, bytes) else index.read()
                if int.from_bytes(stored[-4:], "little") != crc32c(stored[:-4]):
                    raise ValueError("the checksum of its index is another")
                self._indexes[key] = stored
            number = int(np.ravel_multi_index([i % count for i, count in zip(at, counts, strict=True)], counts))
            entry = self._indexes[key][16 * number : 16 * number + 16]
            offset, length = int.from_bytes(entry[:8], "little"), int.from_bytes(entry[8:], "little")
            return None if offset == length == _ABSENT else _part(value, offset, length)


def _length(value: Value) -> int:
    return len(value) if isinstance(value, bytes) else value.length


def _part(value: Value, offset: int, length: int) -> Value:
    if not 0 <= offset <= offset + length <= _length(value):
        raise ValueError(f"bytes {offset} to {offset + length} of {_length(value)}")
    if isinstance(value, bytes):
        return value[offset : offset + length]
    return Span(value.path, value.offset + offset, length)


def arrays_of(values: Mapping[str, Value], *, filled: bool) -> dict[str, ZarrArray]:
    """The arrays among the keys of a store, by name. `filled` says that chunks of nothing but the fill value were left
    out. Raises DamagedCheckpoint for a description that is none, and CheckpointError for what is not read."""
    found: dict[str, ZarrArray] = {}
    left = _MOST_ABOUT
    for key, value in values.items():
        if key.endswith((ABOUT_2, ABOUT_3)):
            name, _, file = key.rpartition("/")
            left -= _length(value)
            if _length(value) > _LARGEST_ABOUT or left < 0:
                what = f"an array's description of {_length(value)} bytes, or more than {_MOST_ABOUT} of all arrays"
                raise DamagedCheckpoint(what, where=key, do="Is the copy whole?")
            about = parse_json(value if isinstance(value, bytes) else value.read(), key)
            if about.get("node_type", "array") != "array":
                continue
            if name in found:
                raise DamagedCheckpoint(f"`{name}` is described twice", where=key, do="Is the copy whole?")
            with damage("not the description of an array", key):
                found[name] = (_format_2 if f"/{file}" == ABOUT_2 else _format_3)(name, about, values, filled)
    return found


def _format_2(name: str, about: Mapping[str, Any], values: Mapping[str, Value], filled: bool) -> ZarrArray:
    plain = {"zarr_format": 2, "filters": None, "order": "C"}
    for key, value in plain.items():
        _only(name, key, about.get(key), value)
    compressor = about.get("compressor")
    kind = compressor["id"] if isinstance(compressor, dict) else compressor
    _only(name, "compressor", kind, None, "zstd")
    chunk = sizes(about["chunks"])
    separator = about.get("dimension_separator", ".")
    _only(name, "dimension_separator", separator, ".", "/")
    filled = filled and about.get("fill_value") in (None, 0, False)
    dtype = _dtype(name, about["dtype"])
    prefix = f"{name}/" if chunk else f"{name}/0"
    return ZarrArray(
        name, sizes(about["shape"]), dtype, chunk, chunk, False, kind is not None, prefix, separator, values, filled
    )


def _format_3(name: str, about: Mapping[str, Any], values: Mapping[str, Value], filled: bool) -> ZarrArray:
    _only(name, "zarr_format", about.get("zarr_format"), 3)
    _only(name, "storage_transformers", about.get("storage_transformers") or None, None)
    _only(name, "chunk_grid", about["chunk_grid"]["name"], "regular")
    shard = chunk = sizes(about["chunk_grid"]["configuration"]["chunk_shape"])
    codecs, sharded = about["codecs"], False
    if codecs[0]["name"] == "sharding_indexed":
        settings, sharded = codecs[0]["configuration"], True
        _only(name, "codecs after sharding_indexed", len(codecs), 1)
        _only(name, "index_location", settings.get("index_location", "end"), "end")
        _only(name, "index_codecs", [one["name"] for one in settings["index_codecs"]], ["bytes", "crc32c"])
        chunk, codecs = sizes(settings["chunk_shape"]), settings["codecs"]
    names = [one["name"] for one in codecs]
    _only(name, "codecs", names, ["bytes"], ["bytes", "zstd"])
    _only(name, "endian", codecs[0].get("configuration", {}).get("endian", "little"), "little")
    keys = about["chunk_key_encoding"]
    _only(name, "chunk_key_encoding", keys["name"], "default")
    separator = keys.get("configuration", {}).get("separator", "/")
    _only(name, "separator", separator, ".", "/")
    filled = filled and about.get("fill_value") in (0, False)
    dtype = _dtype(name, about["data_type"])
    prefix = f"{name}/c{separator}" if shard else f"{name}/c"
    return ZarrArray(
        name, sizes(about["shape"]), dtype, chunk, shard, sharded, len(names) > 1, prefix, separator, values, filled
    )


def _dtype(name: str, said: object) -> DType:
    names = {dtype.value: dtype for dtype in DType} | _DTYPES_2
    if not isinstance(said, str) or said not in names:
        _only(name, "dtype", said, "float32", "bfloat16")
    return names[str(said)]


def _only(name: str, key: str, value: object, *known: object) -> None:
    """Raise CheckpointError for what is written otherwise than Orbax does."""
    if value not in known:
        what = f"`{name}` has {key} {shown(value)}, which is not read: Orbax writes {' or '.join(map(shown, known))}"
        do = "Restore it with Orbax and save it again with its defaults."
        raise CheckpointError(what, do=do)
