"""Write archives of `torch.save`, with holes for the bytes of large tensors, which are written later.

The entries are those of torch.save in another order: first the holes, then everything small. So the offsets of tensors
depend on the tensors alone, and what is only known at the end (FP8 state) can have any size.
"""

from __future__ import annotations

import argparse
import functools
import io
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, cast

from precisionctl.dtypes import DType
from precisionctl.fp8.opcodes import Global, PersistentId, PickledObject, dumps
from precisionctl.torch_when_used import torch
from precisionctl.untrusted.safe_pickle import STORAGES

_ALIGNMENT = 64
"""Bytes that storages are aligned to in an archive, as by torch.save."""


@dataclass(frozen=True, eq=False)
class Blank:
    """Stands for a contiguous tensor whose bytes are written later. The same Blank in two places is a shared tensor."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Archive:
    """The layout of an archive of `length` bytes: `pieces` are (offset, bytes) around the holes, and `holes` has the
    offset at which each Blank's row-major bytes belong.
    """

    pieces: tuple[tuple[int, bytes], ...]
    holes: Mapping[Blank, int]
    length: int

    def write_around(self, file: int) -> None:
        """Write everything except the holes to an open file."""
        for start, piece in self.pieces:
            os.pwrite(file, piece, start)


@dataclass(frozen=True)
class TensorArchive:
    """The archive of one tensor: `head`, then its `nbytes` bytes, then `tail`."""

    head: bytes
    nbytes: int
    tail: bytes

    @property
    def length(self) -> int:
        return len(self.head) + self.nbytes + len(self.tail)


def lay_out(value: object) -> Archive:
    """The archive of an object made of lists, tuples, dicts, Namespaces, tensors, Blanks and plain values.

    Equal values give equal bytes, and a Blank takes no memory. `holes` depend on the Blanks alone. The CRCs of their
    entries are 0, as the bytes are not known yet: PyTorch does not check them (`zipfile.testzip` would).
    """
    blanks: dict[Blank, str] = {}
    _number(value, blanks)
    tensors: dict[str, torch.Tensor] = {}
    data = dumps(_as_opcodes(value, blanks, tensors), protocol=2)
    around = _AroundHoles()
    archive = torch._C.PyTorchFileWriter(cast(IO[bytes], around), storage_alignment=_ALIGNMENT)
    for blank, name in blanks.items():
        archive.write_record_metadata(f"data/{name}", blank.nbytes)  # type: ignore[attr-defined]
    archive.write_record("data.pkl", data, len(data))
    for name, text in ((".format_version", "1"), (".storage_alignment", str(_ALIGNMENT)), ("byteorder", sys.byteorder)):
        archive.write_record(name, text.encode(), len(text))
    for name, tensor in tensors.items():
        row_major = bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
        archive.write_record(f"data/{name}", row_major, tensor.nbytes)
    archive.write_end_of_file()
    return around.archive(list(blanks))


def _number(value: Any, blanks: dict[Blank, str]) -> None:
    """Give the storage of each Blank in a value a name, in the order of appearance."""
    if isinstance(value, Blank):
        blanks.setdefault(value, str(len(blanks)))
    elif isinstance(value, list | tuple):
        for item in value:
            _number(item, blanks)
    elif isinstance(value, dict | argparse.Namespace):
        for item in (value if isinstance(value, dict) else vars(value)).values():
            _number(item, blanks)


def _as_opcodes(value: Any, blanks: Mapping[Blank, str], tensors: dict[str, torch.Tensor]) -> object:
    """Translate a value into what `opcodes.dumps` takes; its tensors are added to `tensors` by storage name."""
    if isinstance(value, Blank):
        return _tensor(value, blanks[value])
    if isinstance(value, torch.Tensor):
        name = str(len(blanks) + len(tensors))
        tensors[name] = value
        return _tensor(value, name)
    if isinstance(value, DType | torch.dtype):
        return Global("torch", (value if isinstance(value, DType) else DType.of(value)).value)
    if isinstance(value, io.BytesIO):
        return PickledObject(Global("_io", "BytesIO"), (), new=True, fields=(value.getvalue(), 0, None))
    if isinstance(value, argparse.Namespace):
        fields = {name: _as_opcodes(item, blanks, tensors) for name, item in vars(value).items()}
        return PickledObject(Global("argparse", "Namespace"), (), new=True, fields=fields)
    if isinstance(value, dict):
        return {key: _as_opcodes(item, blanks, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_as_opcodes(item, blanks, tensors) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _tensor(tensor: Blank | torch.Tensor, name: str) -> PickledObject:
    """A contiguous tensor as PyTorch pickles it."""
    shape = tuple(tensor.shape)
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    dtype = tensor.dtype if isinstance(tensor, Blank) else DType.of(tensor.dtype)
    storage = PersistentId(("storage", _STORAGE_CLASSES[dtype], name, "cpu", math.prod(shape)))
    hooks = PickledObject(Global("collections", "OrderedDict"), ())
    return PickledObject(Global("torch._utils", "_rebuild_tensor_v2"), (storage, 0, shape, stride, False, hooks))


_STORAGE_CLASSES = {dtype: Global(*name) for name, dtype in STORAGES.items()}


@functools.cache
def record(dtype: DType, shape: tuple[int, ...]) -> TensorArchive:
    """The archive of one tensor of this dtype and shape, as `lay_out` makes it."""
    archive = lay_out(Blank(dtype, shape))
    (hole,) = archive.holes.values()
    head = b"".join(piece for start, piece in archive.pieces if start < hole)
    tail = b"".join(piece for start, piece in archive.pieces if start >= hole)
    return TensorArchive(head, archive.length - len(head) - len(tail), tail)


def dump(value: object) -> bytes:
    """The bytes that torch.save writes for an object. Equal values give equal bytes."""
    buffer = io.BytesIO()
    torch.save(_interned(value), buffer)
    return buffer.getvalue()


def _interned(value: Any) -> Any:
    """The same value with equal strings made one object: a pickle's bytes depend on which objects are shared."""
    if type(value) is str:
        return sys.intern(value)
    if type(value) in (list, tuple):
        return type(value)(_interned(item) for item in value)
    if type(value) is dict:
        return {_interned(key): _interned(item) for key, item in value.items()}
    if isinstance(value, argparse.Namespace):
        return argparse.Namespace(**_interned(vars(value)))
    return value.torch if isinstance(value, DType) else value


class _AroundHoles(io.RawIOBase):
    """A file for PyTorch's archive writer that records what is written, and the holes: a relative seek skips the bytes
    of a storage."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, bytearray]] = [(0, bytearray())]
        self._holes: list[tuple[int, int]] = []

    @property
    def _end(self) -> int:
        start, piece = self._pieces[-1]
        return start + len(piece)

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._pieces[-1][1].extend(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_CUR:
            raise io.UnsupportedOperation("PyTorch lays archives out in another way than it did")
        self._holes.append((self._end, offset))
        self._pieces.append((self._end + offset, bytearray()))
        return self._end

    def archive(self, blanks: list[Blank]) -> Archive:
        """The recorded archive, with a hole for each Blank. PyTorch makes no hole for a tensor without elements."""
        holes = iter(self._holes)
        found = [next(holes) if blank.nbytes else (0, 0) for blank in blanks]
        if [length for _, length in found] != [blank.nbytes for blank in blanks] or next(holes, None):
            raise io.UnsupportedOperation("PyTorch lays archives out in another way than it did")
        pieces = tuple((start, bytes(piece)) for start, piece in self._pieces)
        starts = {blank: start for blank, (start, _) in zip(blanks, found, strict=True)}
        return Archive(pieces, starts, self._end)
