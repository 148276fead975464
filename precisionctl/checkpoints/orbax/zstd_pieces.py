"""What is compressed with Zstandard, decompressed a piece at a time (extra `orbax`)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, BinaryIO, TypeAlias

from precisionctl.checkpoints.torch_files.torch_zip import Span
from precisionctl.errors import DamagedCheckpoint, require_package

Value: TypeAlias = Span | bytes
"""A value of a key-value store: where it is, or itself if it is small."""

_PIECE = 1 << 20


def pieces(value: Value, compressed: bool, where: object) -> Iterator[bytes]:
    """Yield what a value holds, at most 1 MiB at a time: a few bytes of Zstandard may be any number of zeros.

    Raises DamagedCheckpoint for what is no Zstandard, and EnvironmentProblem where nothing decompresses it.
    """
    if isinstance(value, bytes):
        yield from _pieces(io.BytesIO(value), compressed, where)
        return
    with open(value.path, "rb", buffering=0) as file:
        file.seek(value.offset)
        yield from _pieces(io.BufferedReader(_PartOfFile(file, value.length), _PIECE), compressed, where)


def read_at_most(value: Value, compressed: bool, most: int, where: object) -> bytearray:
    """All that a value holds. Raises as `pieces`, and DamagedCheckpoint for more than `most` bytes."""
    found = bytearray()
    for piece in pieces(value, compressed, where):
        found += piece
        if len(found) > most:
            raise DamagedCheckpoint(f"more than {most} bytes, as nothing of its kind has", where=where)
    return found


class _PartOfFile(io.RawIOBase):
    """The next `left` bytes of a file, as a file to read."""

    def __init__(self, file: io.FileIO, left: int) -> None:
        self._file, self._left = file, left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        done = self._file.readinto(memoryview(buffer)[: self._left]) or 0
        self._left -= done
        return done


def _pieces(file: BinaryIO, compressed: bool, where: object) -> Iterator[bytes]:
    if not compressed:
        while piece := file.read(_PIECE):
            yield piece
        return
    require_package("zstandard", "orbax", "reading what is compressed with Zstandard")
    import zstandard

    reader = zstandard.ZstdDecompressor().stream_reader(file)  # windows of more than 128 MiB are refused
    try:
        while piece := reader.read(_PIECE):
            yield piece
    except zstandard.ZstdError as error:
        raise DamagedCheckpoint(f"not what Zstandard writes: {error}", where=where, do="Is the copy whole?") from error
