"""Boxes of compressed arrays, in constant memory.

A chunk of Orbax has up to 2 GB, all layers of a kind among them, and Zstandard decompresses from the beginning only.
So the first read of a chunk decompresses it into a temporary file, which has no name and ends with the last process
that reads. Processes that are forked later share it: each chunk is decompressed once.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from precisionctl.checkpoints.orbax.zarr_array import ZarrArray
from precisionctl.checkpoints.orbax.zstd_pieces import pieces
from precisionctl.errors import DamagedCheckpoint, DiskProblem
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

_UNKNOWN, _IN_FILE, _ZEROS = 0, 1, 2
_MOST_CHUNKS, _MOST_BYTES, _MOST_PADDED = 1 << 26, 1 << 46, 8
"""Of all arrays: a model of 10^12 parameters in FP32 with its moments has 12 TB. Chunks at an array's ends are as large
as the others: Orbax cuts arrays where nothing is left over, and however three dimensions are cut, chunks have less than
8 times the array's bytes."""


class DecodedChunks:
    """The chunks of some arrays, decompressed when they are first read. Raises DiskProblem where no temporary file can
    be made, and DamagedCheckpoint for more than any model has."""

    def __init__(self, arrays: Iterable[ZarrArray]) -> None:
        self._first: dict[str, tuple[int, int]] = {}  # the number of an array's first chunk, and where that begins
        number, offset = 0, 0
        for array in arrays:
            self._first[array.name] = number, offset
            count, size = math.prod(array.grid), math.prod(array.shape) * array.dtype.itemsize
            number, offset = number + count, offset + count * _pitch(array)
            if number > _MOST_CHUNKS or offset > _MOST_BYTES or count * array.chunk_bytes > _MOST_PADDED * size:
                what = f"arrays of {number} chunks and {offset} bytes up to `{array.name}` of {size}, as no model has"
                raise DamagedCheckpoint(what, do="Is the copy whole?")
        with _on_disk():
            file = tempfile.TemporaryFile(dir=_directory(), buffering=0)
        weakref.finalize(self, file.close)
        self._file = file.fileno()
        self._state = mmap.mmap(-1, number or 1)  # shared with processes that are forked

    def read(self, array: ZarrArray, box: Sequence[range]) -> Tensor:
        """The elements of a box, of a range in each dimension, in the array's dtype.

        Raises DamagedCheckpoint for chunks that are missing, are no Zstandard or have another size, and DiskProblem
        where the temporary file has no room.
        """
        found = torch.zeros([len(each) for each in box], dtype=array.dtype.torch)
        parts = list(zip(box, array.chunk, strict=True))
        for at in itertools.product(*(range(each.start // part, -(-each.stop // part)) for each, part in parts)):
            if (chunk := self._chunk(array, at)) is not None:
                here, there = [], []
                for (each, part), i in zip(parts, at, strict=True):
                    start, stop = max(each.start, i * part), min(each.stop, (i + 1) * part)
                    here.append(slice(start - i * part, stop - i * part))
                    there.append(slice(start - each.start, stop - each.start))
                found[tuple(there)] = chunk[tuple(here)]
        return found

    def _chunk(self, array: ZarrArray, at: tuple[int, ...]) -> Tensor | None:
        """A chunk, mapped from the file; None where it is zeros."""
        within = int(np.ravel_multi_index(at, array.grid)) if at else 0
        number, offset = self._first[array.name]
        number, offset = number + within, offset + within * _pitch(array)
        if self._state[number] == _UNKNOWN:
            # Other processes wait for this lock; threads of one may write the same bytes twice
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, number)
            try:
                if self._state[number] == _UNKNOWN:  # no other process has done it meanwhile
                    self._state[number] = self._decode(array, at, offset)
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)
        if self._state[number] == _ZEROS:
            return None
        mapped = mmap.mmap(self._file, array.chunk_bytes, offset=offset)  # ends with the tensor
        return torch.frombuffer(mapped, dtype=array.dtype.torch).view(array.chunk)

    def _decode(self, array: ZarrArray, at: tuple[int, ...], offset: int) -> int:
        value = array.place(at)
        if value is None:
            return _ZEROS
        where = f"`{array.name}`, chunk {list(at)}"
        left = array.chunk_bytes
        for piece in pieces(value, array.compressed, where):
            if len(piece) > left:
                break
            with _on_disk():
                while piece:  # a write may end early
                    written = os.pwrite(self._file, piece, offset + array.chunk_bytes - left)
                    piece, left = piece[written:], left - written
        else:
            if not left:
                return _IN_FILE
        what = f"a chunk of another size than {array.chunk_bytes} bytes"
        raise DamagedCheckpoint(what, where=where, do="Is the copy whole?")


def _pitch(array: ZarrArray) -> int:
    """From one chunk to the next in the file: a multiple of what a mapping may begin at."""
    return -(-array.chunk_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _directory() -> str:
    """TMPDIR, else the directory for temporary files that may be large: `/tmp` may be memory."""
    return os.environ.get("TMPDIR") or ("/var/tmp" if os.access("/var/tmp", os.W_OK) else "/tmp")


@contextmanager
def _on_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        room = "no room for decompressed weights" if error.errno in _FULL else f"no temporary file: {error.strerror}"
        do = "Set TMPDIR to a directory on a disk with room for the whole model as it is stored, decompressed."
        raise DiskProblem(room, where=_directory(), do=do) from error
