"""ZIP archives as PyTorch's own reader takes them (`torch._C.PyTorchFileReader`), with holes for bytes that are written
later, and without importing torch.

Records are not compressed, and start at multiples of 64 bytes. Facts from caffe2/serialize/inline_container.cc and
third_party/miniz of PyTorch 2.11 to 2.15. Its writer adds a record that only its logs read: a hash, as an identity.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple

ALIGNMENT = 64
"""Bytes that records are aligned to, as by torch.save."""

_WIDE = 0xFFFFFFFF
"""Sizes and offsets from here on are stored in fields of 64 bits."""


class Records(NamedTuple):
    """An archive of `length` bytes: `pieces` are (offset, bytes) around the holes, which start at `holes`."""

    pieces: tuple[tuple[int, bytes], ...]
    holes: tuple[int, ...]
    length: int


def lay_out_records(records: Iterable[tuple[str, bytes | int]]) -> Records:
    """The archive of these records, each with a name and its bytes, or the size of the hole that they are written to.

    The CRC of a hole is 0, as its bytes are not known yet: PyTorch does not check them (`zipfile.testzip` would).
    """
    records = [*records, ("version", b"3\n")]
    pieces, holes, directory = [(0, bytearray())], list[int](), bytearray()

    def end() -> int:
        return pieces[-1][0] + len(pieces[-1][1])

    for name, content in records:
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
        extra = _extra(size, size, at)
        if size:
            pieces[-1][1].extend(struct.pack("<4sIQQ" if extra else "<4sIII", b"PK\7\10", crc, size, size))
        narrow = min(size, _WIDE)
        lengths = (len(path), len(extra))
        directory += struct.pack("<4s4xH6xIIIHH10xI", b"PK\1\2", flags, crc, narrow, narrow, *lengths, min(at, _WIDE))
        directory += path + extra
    at, count = end(), len(records)
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
