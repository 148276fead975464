"""Read the head of a GGUF file: its metadata, and where each tensor is.

A file is `GGUF`, a version, two counts, metadata (key, type, value), the tensors' names, shapes, types and offsets, and
the tensors, each at a multiple of an alignment. What llama.cpp's reader refuses is refused here: duplicates, arrays in
arrays, holes and overlaps. Sources: ggml/src/gguf.cpp (gguf_init_from_reader), docs/gguf.md of ggml.
"""

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from precisionctl.codes.ggml_formats import FORMATS, UNREAD, BlockFormat
from precisionctl.errors import DamagedCheckpoint, NotUnderstood, shown
from precisionctl.untrusted.safe_files import check_fetched

MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""Those whose files are laid out as described here. The first had other sizes of numbers."""
ALIGNMENT = 32
"""Of the first byte of each tensor, where no `general.alignment` says another."""

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letters for types of numbers (enum gguf_type)."""
BOOL, STRING, ARRAY = 7, 8, 9
TYPES = dict(enumerate(("uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "bool", "string"))) | {
    10: "uint64",
    11: "int64",
    12: "float64",
}
"""Words for types of values."""

_LONGEST_HEAD = 256_000_000
"""Most bytes before the tensors. Tokens, their scores and merges have up to 30 MB."""
_LONGEST_STRING = 1 << 20
"""Bytes of a string that is kept, such as a chat template."""
_LONGEST_LIST = 4096
"""Numbers of an array that is kept: more than layers of any model. Of longer ones, and of strings, the length is."""
_MOST_KEPT = 1 << 16
"""Numbers of all arrays that are kept. Each takes 36 bytes."""
_MOST_STRINGS = 1 << 21
"""Strings of all arrays: more than tokens and merges of any tokenizer. Each takes a call to read."""
_MOST_TENSORS = 1 << 16
"""Experts of a layer are one tensor."""
_MOST_KEYS = 1 << 16
_LONGEST_NAME = 64
"""llama.cpp's GGML_MAX_NAME."""
_MOST_DIMENSIONS = 4
_LARGEST_ALIGNMENT = 1 << 20
_ALIGNMENT_KEY = "general.alignment"


@dataclass(frozen=True)
class ArrayLength:
    """In the place of an array that is not kept: how many elements it has."""

    length: int


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a file: its shape as PyTorch has it, its format, and the byte where it starts."""

    shape: tuple[int, ...]
    format: BlockFormat
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.format.values * self.format.size


@dataclass(frozen=True)
class GgufHead:
    """What a file says before its tensors' values. `types` has a word for each key of the metadata, which is `list of`
    one for arrays."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    types: Mapping[str, str]


def read_head(path: Path) -> GgufHead:
    """The head of a file. Raises DamagedCheckpoint for a file that is truncated or contradicts the format, and
    NotUnderstood for a version, a byte order or a format of tensors that is not read."""
    with open(path, "rb") as file:
        cursor = _Cursor(file, path)
        if cursor.take(len(MAGIC)) != MAGIC:
            check_fetched(path)
            raise DamagedCheckpoint("not a GGUF file: it does not begin with GGUF", where=path, do="Copy it again.")
        (version,) = cursor.numbers("I")
        if version & 0xFFFF == 0:
            do = "llama.cpp's gguf_convert_endian.py turns it."
            raise NotUnderstood("GGUF in big-endian order, which is not read", where=path, do=do)
        if version not in VERSIONS:
            what = f"version {version} of GGUF, and known are {' and '.join(map(str, VERSIONS))}"
            raise NotUnderstood(what, where=path, do="Let llama.cpp's llama-quantize write it again (with COPY).")
        tensors, keys = cursor.numbers("QQ")
        if tensors > _MOST_TENSORS or keys > _MOST_KEYS:
            raise cursor.damaged(f"{tensors} tensors and {keys} keys")
        metadata, types = dict[str, Any](), dict[str, str]()
        for _ in range(keys):
            key = cursor.string(_LONGEST_STRING)
            if key in metadata:
                raise cursor.damaged(f"the key {shown(key)} is there twice")
            metadata[key], types[key] = _read_value(cursor, key)
        described = [_read_tensor(cursor) for _ in range(tensors)]
        start = cursor.at

    alignment = metadata.get(_ALIGNMENT_KEY, ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.damaged(f"{_ALIGNMENT_KEY} is {shown(alignment)}")

    end = start = aligned(start, alignment)
    found = dict[str, GgufTensor]()
    for name, shape, form, offset in described:
        place = GgufTensor(shape, form, path, start + offset)
        if name in found:
            raise cursor.damaged(f"`{name}` is there twice")
        if place.offset != aligned(end, alignment):
            raise cursor.damaged(f"`{name}` overlaps another tensor or leaves a hole")
        end = place.offset + place.nbytes
        found[name] = place
    if not end <= cursor.size <= max(start, aligned(end, alignment)) and found:
        what = f"{cursor.size} bytes where its head describes {end}"
        raise DamagedCheckpoint(what, where=path, do="Truncated? Copy it again.")
    return GgufHead(metadata, found, types)


def aligned(offset: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of an alignment."""
    return -(-offset // alignment) * alignment


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape as ggml writes it, without first dimensions of 1; the last one stays."""
    return next((shape[first:] for first, size in enumerate(shape) if size > 1), shape[-1:])


class _Cursor:
    """Where a head is read. Raises DamagedCheckpoint where the file, or what a head may have, ends."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self.path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self.at = 0
        self._strings = self._kept = 0

    def damaged(self, what: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(what, where=self.path, do="Copy it again.")

    def take(self, count: int) -> bytes:
        self._check(count)
        self.at += count
        found = self._file.read(count)
        if len(found) != count:
            raise self.damaged("truncated")
        return found

    def skip(self, count: int) -> None:
        self._check(count)
        self.at += count
        self._file.seek(count, os.SEEK_CUR)

    def numbers(self, letters: str) -> tuple[Any, ...]:
        stored = self.take(struct.calcsize(f"<{letters}"))
        if letters.endswith(NUMBERS[BOOL]) and max(stored, default=0) > 1:
            raise self.damaged(f"a {TYPES[BOOL]} is {max(stored)}, neither 0 nor 1")
        return struct.unpack(f"<{letters}", stored)

    def array(self, count: int, letter: str) -> list[Any]:
        self._kept += count
        if self._kept > _MOST_KEPT:
            raise self.damaged(f"{self._kept} numbers in arrays")
        return list(self.numbers(f"{count}{letter}"))

    def string(self, longest: int) -> str:
        (length,) = self.numbers("Q")
        if length > longest:
            raise self.damaged(f"a string of {length} bytes")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.damaged("a string that is no UTF-8") from None

    def skip_strings(self, count: int) -> None:
        self._strings += count
        if self._strings > _MOST_STRINGS:
            raise self.damaged(f"{self._strings} strings in arrays")
        for _ in range(count):
            self.skip(int.from_bytes(self.take(8), "little"))

    def _check(self, count: int) -> None:
        if count > min(self.size, _LONGEST_HEAD) - self.at:
            raise self.damaged("truncated, or its head is longer than any model's")


def _read_value(cursor: _Cursor, key: str) -> tuple[Any, str]:
    """A value, and the word for its type."""
    (kind,) = cursor.numbers("I")
    if kind == STRING:
        return cursor.string(_LONGEST_STRING), TYPES[STRING]
    if kind != ARRAY:
        return cursor.numbers(_letter(cursor, key, kind))[0], TYPES[kind]
    kind, length = cursor.numbers("IQ")
    if kind == STRING:
        cursor.skip_strings(length)
        return ArrayLength(length), f"list of {TYPES[STRING]}"
    letter = _letter(cursor, key, kind)
    if length > _LONGEST_LIST:
        cursor.skip(length * struct.calcsize(letter))
        return ArrayLength(length), f"list of {TYPES[kind]}"
    return cursor.array(length, letter), f"list of {TYPES[kind]}"


def _letter(cursor: _Cursor, key: str, kind: int) -> str:
    if kind not in NUMBERS:
        raise cursor.damaged(f"the key {shown(key)} has a value of type {kind}")
    return NUMBERS[kind]


def _read_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], BlockFormat, int]:
    name = cursor.string(_LONGEST_NAME)
    (dimensions,) = cursor.numbers("I")
    if not 0 < dimensions <= _MOST_DIMENSIONS:
        raise cursor.damaged(f"`{name}` has {dimensions} dimensions")
    shape = cursor.numbers("Q" * dimensions)[::-1]
    kind, offset = cursor.numbers("IQ")
    form = FORMATS.get(kind)
    if form is None:
        what = f"`{name}` is {UNREAD.get(kind, f'in format {kind} of ggml')}, which is not read"
        raise NotUnderstood(what, where=cursor.path, do="docs/gguf.md lists the formats that are. Take another file.")
    if shape[-1] % form.values:
        raise cursor.damaged(f"`{name}` has rows of {shape[-1]}, and blocks of {form.name} have {form.values} values")
    return name, shape, form, offset
