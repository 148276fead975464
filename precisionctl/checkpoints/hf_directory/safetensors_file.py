"""Safetensors files: read a header to find where each tensor is, and make headers.

A file is 8 bytes of header length (little endian), a JSON header, and the tensors back to back
(safetensors/README.md, "Format"). The library does not tell tensors' offsets, which copying needs, so headers are
parsed here. What the library's reader refuses is refused here, too: overlaps, holes, wrong lengths.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from precisionctl.checkpoints.chunks import Chunk, whole
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, NotUnderstood, at, damage, shown
from precisionctl.param import TensorSpec, shared_spec
from precisionctl.untrusted.safe_files import check_fetched, whole_length
from precisionctl.untrusted.safe_json import parse_json
from precisionctl.untrusted.safe_pickle import sizes

DTYPES: Mapping[str, DType] = {
    "F64": DType.float64,
    "F32": DType.float32,
    "F16": DType.float16,
    "BF16": DType.bfloat16,
    "F8_E4M3": DType.float8_e4m3fn,
    "F8_E5M2": DType.float8_e5m2,
    "F8_E4M3FNUZ": DType.float8_e4m3fnuz,
    "F8_E5M2FNUZ": DType.float8_e5m2fnuz,
    "F8_E8M0": DType.float8_e8m0fnu,
    "C64": DType.complex64,
    "I64": DType.int64,
    "I32": DType.int32,
    "I16": DType.int16,
    "I8": DType.int8,
    "U64": DType.uint64,
    "U32": DType.uint32,
    "U16": DType.uint16,
    "U8": DType.uint8,
    "BOOL": DType.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NOT_READ = ("F4", "F6_E2M3", "F6_E3M2")
"""Dtypes of the format whose elements are no whole bytes. No model that people serve is stored in them."""
LONGEST_HEADER = 100_000_000  # the library's own limit
_MOST_VALUES = 8_000_000
"""Most commas and brackets in a header, enough for half a million tensors. Parsing 100 MB of `[],` takes gigabytes."""
_LARGEST_NUMBER = 1 << 63
LONGEST_NAME = 4096
"""Letters of a tensor's name, which patterns are matched with. Models' have up to 200."""
OFFSETS = "DCP_SHARDING_INFO"
"""What the metadata of a file have that PyTorch's distributed checkpoints wrote (torch 2.13,
distributed/checkpoint/_hf_utils.py): JSON with the `saved_offsets` of each tensor, which may be a piece of a larger one
of its name."""

FILE_OF_RANK = re.compile(r"shard-(?P<rank>\d+)-model-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
"""How PyTorch calls files that have pieces (_hf_utils.py, SHARDED_FILE_NAME)."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: its shape and dtype, and the byte of the file where it starts."""

    spec: TensorSpec
    offset: int

    def chunks(self, file: Path) -> Sequence[Chunk]:
        """Where its elements are, in this file."""
        return [Chunk(whole(self.spec), file, self.offset)]


@dataclass(frozen=True, slots=True)
class JoinedTensor(StoredTensor):
    """A tensor whose parts are in several places, perhaps of several files."""

    parts: tuple[Chunk, ...]

    def chunks(self, file: Path) -> Sequence[Chunk]:
        return self.parts


Places: TypeAlias = dict[str, tuple[Path, StoredTensor]]
"""Tensors by name, each with the file that it is in."""


class StoredTensors:
    """Tensors in one or several files, as a source (`Chunked`)."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.specs: Mapping[str, TensorSpec] = {name: stored.spec for name, (_, stored) in places.items()}

    def chunks(self, name: str) -> Sequence[Chunk]:
        file, stored = self.places[name]
        return stored.chunks(file)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a file, by name. Raises as `read_described`, and DamagedCheckpoint for a piece of a tensor. No
    tensor data is read."""
    tensors, metadata = read_described(path)
    of_a_rank = FILE_OF_RANK.fullmatch(path.name)  # the first rank's pieces all begin at 0, and so does what is whole
    for name, place in saved_offsets(tensors, metadata, path).items():
        if of_a_rank or any(place):
            what = f"`{name}` is a piece, at {list(place)}, of a tensor that other files have the rest of"
            do = "Give the directory with the files of all ranks, as they were saved, and no index beside them."
            raise DamagedCheckpoint(what, where=path, do=do)
    return tensors


def saved_offsets(
    tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str], path: Path
) -> dict[str, tuple[int, ...]]:
    """Where the metadata of a file say that each of its tensors is in the whole one of its name; empty where they say
    nothing. Raises DamagedCheckpoint for what PyTorch does not write."""
    if OFFSETS not in metadata:
        return {}
    said = parse_json(metadata[OFFSETS].encode(), f"{path}, {OFFSETS}")
    with damage(f"{OFFSETS} is not what PyTorch writes", path):
        found = {name: sizes(one["saved_offsets"]) for name, one in said.items()}
        if found.keys() != tensors.keys():
            raise ValueError(f"it is of other tensors, such as `{min(found.keys() ^ tensors.keys())}`")
        if odd := [name for name, place in found.items() if len(place) != len(tensors[name].spec.shape)]:
            raise ValueError(f"`{odd[0]}` {list(tensors[odd[0]].spec.shape)} is at {list(found[odd[0]])}")
    return found


def header_has(path: Path, text: bytes) -> bool:
    """Whether a file's header has these bytes somewhere. Parsing one takes a hundred times as long."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return text in file.read(min(length, LONGEST_HEADER))


def read_described(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Every tensor of a file by name, and the file's metadata. Raises DamagedCheckpoint for a file that is not in the
    format, or truncated, or with overlaps or holes; NotUnderstood for a dtype of less than a byte."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER):
                check_fetched(path)
                raise DamagedCheckpoint("truncated, or not a safetensors file", where=path, do="Copy it again.")
            header, metadata = _parse(file.read(length))
        with at(path):
            tensors = {name: _stored(entry, 8 + length) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = f"the header makes no sense: {type(error).__name__}: {error}"
        raise DamagedCheckpoint(what, where=path, do="Copy it again.") from error
    expected = 8 + length  # tensors must fill the rest of the file without holes or overlaps
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].spec.nbytes)):
        if stored.offset != expected:
            raise DamagedCheckpoint(f"`{name}` overlaps another tensor or leaves a hole", where=path)
        expected += stored.spec.nbytes
    if size == 8 + length:
        size = whole_length(path) or size
    if expected != size:
        what = f"{size} bytes where its header describes {expected}"
        raise DamagedCheckpoint(what, where=path, do="Truncated? Copy it again.")
    return tensors, metadata


def _parse(text: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """The entries of a header, and its metadata. As strict as the library, and stricter about duplicate keys."""
    if not text.startswith(b"{") or sum(map(text.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise ValueError("the header is not a JSON object of tensors")
    header: dict[str, Any] = json.loads(text.decode(), object_pairs_hook=_once, parse_int=_natural)
    metadata = header.pop("__metadata__", None)
    if metadata is None:  # MLX writes a null where there is nothing to say
        metadata = {}
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        raise ValueError("`__metadata__` is not made of strings")
    if longest := max((len(name) for name in header if len(name) > LONGEST_NAME), default=0):
        raise ValueError(f"a name of {longest} letters, more than {LONGEST_NAME}")
    for word in (*header, *metadata, *metadata.values()):
        word.encode()  # raises for half a surrogate pair, which JSON can express and UTF-8 cannot
    return header, metadata


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _natural(digits: str) -> int:
    number = int(digits)
    if digits[0] == "-" or number >= _LARGEST_NUMBER:
        raise ValueError(f"{digits} as a size or offset")
    return number


def _stored(entry: Mapping[str, Any], base: int) -> StoredTensor:
    if entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("a tensor is described by its dtype, shape and data_offsets")
    shape, (begin, end) = sizes(entry["shape"]), sizes(entry["data_offsets"])
    if entry["dtype"] in _NOT_READ:
        what = f"tensors of dtype {entry['dtype']} are not converted"
        raise NotUnderstood(what, do="Let the program that wrote it write BF16, or codes packed into U8.")
    spec = shared_spec(shape, DTYPES[entry["dtype"]])
    if end - begin != spec.nbytes:
        raise ValueError(f"{end - begin} bytes for {entry['dtype']} {shown(shape)}")
    return StoredTensor(spec, base + begin)


def make_header(
    specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] = MappingProxyType({"format": "pt"})
) -> tuple[bytes, dict[str, int]]:
    """The bytes before the data (length and JSON), and each tensor's offset in the file.

    Widest dtypes first, as the library orders them, so that every tensor is aligned to its element.
    """
    ordered = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)
    begins: dict[str, int] = {}
    position = 0
    for name in ordered:
        begins[name] = position
        position += specs[name].nbytes
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name in ordered:
        spec = specs[name]
        span = [begins[name], begins[name] + spec.nbytes]
        header[name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + begin for name, begin in begins.items()}


def split_shards(specs: Mapping[str, TensorSpec], largest: int) -> list[dict[str, TensorSpec]]:
    """Distribute tensors in order to files of at most `largest` bytes; a larger tensor gets a file of its own."""
    shards: list[dict[str, TensorSpec]] = [{}]
    room = largest
    for name, spec in specs.items():
        if spec.nbytes > room and shards[-1]:
            shards.append({})
            room = largest
        shards[-1][name] = spec
        room -= spec.nbytes
    return shards
