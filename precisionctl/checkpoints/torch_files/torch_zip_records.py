"""The ZIP archives that PyTorch's own writer makes (`torch._C.PyTorchFileWriter`), byte for byte, with holes for bytes
that are written later, and without importing torch.

Records are not compressed, and start at multiples of 64 bytes. Facts from caffe2/serialize/inline_container.cc and
third_party/miniz of PyTorch 2.11 to 2.15; tests compare the bytes with PyTorch's.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from precisionctl.errors import CheckpointError

ALIGNMENT = 64
"""Bytes that records are aligned to, as by torch.save."""

_WIDE = 0xFFFFFFFF
"""Sizes and offsets from here on are stored in fields of 64 bits."""
_DESCRIPTOR = b"PK\7\10"
_U64 = (1 << 64) - 1


class Records(NamedTuple):
    """An archive of `length` bytes: `pieces` are (offset, bytes) around the holes, which start at `holes`."""

    pieces: tuple[tuple[int, bytes], ...]
    holes: tuple[int, ...]
    length: int


def lay_out_records(records: Iterable[tuple[str, bytes | int]]) -> Records:
    """The archive of these records, each with a name and its bytes, or the size of the hole that they are written to.

    The CRC of a hole is 0, as its bytes are not known yet: PyTorch does not check them (`zipfile.testzip` would).
    """
    pieces, holes, directory, names, crcs = [(0, bytearray())], list[int](), bytearray(), list[str](), 0

    def end() -> int:
        return pieces[-1][0] + len(pieces[-1][1])

    def add(name: str, content: bytes | int) -> None:
        nonlocal directory, crcs
        size, crc = (content, 0) if isinstance(content, int) else (len(content), zlib.crc32(content))
        path, at = f"archive/{name}".encode(), end()
        flags = 0x808 if size else 0x800  # names are UTF-8; CRC and sizes follow the bytes, if there are any
        extra = _extra(size, 0, at)
        padding = -(at + 30 + len(path) + len(extra) + 4) % ALIGNMENT
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        pieces[-1][1].extend(struct.pack("<4s2xH18xHH", b"PK\3\4", flags, len(path), len(extra)) + path + extra)
        if isinstance(content, int):
            holes.append(end())
            pieces.append((end() + size, bytearray()))
        else:
            pieces[-1][1].extend(content)
            if size >= 8 and content.startswith(_DESCRIPTOR):  # which PyTorch takes for one of its own
                crcs = _combined(crcs, int.from_bytes(content[4:8], "little"))
        extra = _extra(size, size, at)
        if size:
            pieces[-1][1].extend(struct.pack("<4sIQQ" if extra else "<4sIII", _DESCRIPTOR, crc, size, size))
            crcs = _combined(crcs, crc)
        narrow = min(size, _WIDE)
        lengths = (len(path), len(extra))
        directory += struct.pack("<4s4xH6xIIIHH10xI", b"PK\1\2", flags, crc, narrow, narrow, *lengths, min(at, _WIDE))
        directory += path + extra
        names.append(name)

    for name, content in (*records, ("version", b"3\n")):
        add(name, content)
    add(".data/serialization_id", f"{_hash_of_names(tuple(names)):020}{crcs:020}".encode())
    at, count = end(), len(names)
    tail = struct.pack("<4sQHH8xQQQQ", b"PK\6\6", 44, 0x31E, 45, count, count, len(directory), at)
    tail += struct.pack("<4s4xQI", b"PK\6\7", at + len(directory), 1)
    count = min(count, 0xFFFF)
    tail += struct.pack("<4s4xHHII2x", b"PK\5\6", count, count, min(len(directory), _WIDE), min(at, _WIDE))
    pieces[-1][1].extend(directory + tail)
    return Records(tuple((start, bytes(piece)) for start, piece in pieces), tuple(holes), end())


def _extra(size: int, stored: int, at: int) -> bytes:
    """The field of a header with the numbers that are too large for the others; empty if none is."""
    numbers = ([size, stored] if size >= _WIDE else []) + ([at] if at >= _WIDE else [])
    return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


def _combined(seed: int, value: int) -> int:
    """c10::hash_combine."""
    return seed ^ (value + 0x9E3779B9 + (seed << 6 & _U64) + (seed >> 2)) & _U64


_BUCKETS = (
    13, 29, 59, 127, 257, 541, 1109, 2357, 5087, 10273, 20753, 42043, 85229, 172933, 351061, 712697, 1447153, 2938679,
    5967347, 12117689, 24607243, 49969847, 101473717, 206062531,
)  # fmt: skip
"""The numbers of buckets that libstdc++'s std::unordered_set has as it grows. It never has more elements than
buckets."""


@functools.lru_cache(1)  # many ranks have archives with the same names, written one after the other
def _hash_of_names(names: tuple[str, ...]) -> int:
    """The hashes of all names, combined in the order in which a std::unordered_set goes through them: the bucket that
    was filled last comes first, and in a bucket the name that was put there last."""
    hashes = [_hash(name.encode()) for name in names]
    order: list[int] = []
    for size in _BUCKETS:
        buckets: dict[int, list[int]] = {}
        for one in [*order, *hashes[len(order) : size]]:
            buckets.setdefault(one % size, []).append(one)
        order = [one for bucket in reversed(buckets.values()) for one in reversed(bucket)]
        if len(order) == len(hashes):
            return functools.reduce(_combined, order, 0)
    raise CheckpointError(f"an archive of {len(names)} records", do="Write it in more files: shards, or ranks.")


def _hash(text: bytes) -> int:
    """std::hash<std::string> of libstdc++ on 64 bits: MurmurHash64A with its seed."""
    times = 0xC6A4A7935BD1E995
    found = 0xC70F6907 ^ len(text) * times & _U64
    whole = len(text) // 8 * 8
    for start in range(0, whole, 8):
        word = int.from_bytes(text[start : start + 8], "little") * times & _U64
        found = (found ^ (word ^ word >> 47) * times) * times & _U64
    if whole < len(text):
        found = (found ^ int.from_bytes(text[whole:], "little")) * times & _U64
    found = (found ^ found >> 47) * times & _U64
    return found ^ found >> 47
