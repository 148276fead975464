"""Archives of `torch.save`, without loading them: where a tensor's bytes are, and one laid out around a hole.

An archive is a ZIP file of stored entries: `data.pkl` pickles the object and names its storages by number;
each storage is an entry `data/<number>`. Objects (not tensors) are loaded with `weights_only`, classes that
are not here as inert stand-ins.
"""

import argparse
import functools
import io
import math
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from precisionctl import safe_pickle
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, UnsafePickle


@dataclass(frozen=True)
class Span:
    """Bytes `[offset, offset + length)` of a file."""

    path: Path
    offset: int
    length: int

    def __str__(self) -> str:
        return f"{self.path} at byte {self.offset}"

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.length)


@dataclass(frozen=True)
class Located:
    """A contiguous tensor whose row-major bytes start at byte `offset` of its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Record:
    """The archive of one tensor: `head`, then its `nbytes` bytes, then `tail`."""

    head: bytes
    nbytes: int
    tail: bytes

    @property
    def length(self) -> int:
        return len(self.head) + self.nbytes + len(self.tail)


def locate(span: Span) -> Located:
    """Find the tensor that is saved in `span`, reading its archive's directory and pickle only.

    Raises DamagedCheckpoint for anything but one whole, plain, uncompressed tensor, and UnsafePickle.
    """
    with _damage(span), open(span.path, "rb") as file:
        archive = zipfile.ZipFile(_Window(file, span.offset, span.length))
        root = archive.namelist()[0].split("/")[0]
        tensor = safe_pickle.loads(archive.read(_stored(archive, f"{root}/data.pkl")), _TENSOR, span, tuple)
        if not isinstance(tensor, _Tensor):
            raise ValueError("it holds no plain tensor")
        entry = _stored(archive, f"{root}/data/{tensor.key}")
        if entry.file_size != math.prod(tensor.shape) * tensor.dtype.itemsize:
            raise ValueError(f"{entry.file_size} bytes for {tensor.dtype} {list(tensor.shape)}")
        start = _start_of_data(archive.fp, entry)
        if start + entry.file_size > span.length:
            raise ValueError("its bytes reach past its end")
        return Located(tensor.dtype, tensor.shape, span.offset + start)


@functools.cache
def record(dtype: torch.dtype, shape: tuple[int, ...]) -> Record:
    """How torch.save lays out a tensor of this dtype and shape, without its bytes.

    Deterministic. The entry's CRC is 0, since the bytes come later: PyTorch does not look at it,
    `zipfile.testzip` would.
    """
    around = _AroundHole()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], around))  # memory that is never touched
    return Record(bytes(around.head), around.hole, bytes(around.tail))


def dump(value: object) -> bytes:
    """What torch.save writes for an object. Equal values give equal bytes."""
    buffer = io.BytesIO()
    torch.save(_interned(value), buffer)
    return buffer.getvalue()


def _interned(value: Any) -> Any:
    """The same value with one object for all equal strings: a pickle tells what is one object from what is equal."""
    if type(value) is str:
        return sys.intern(value)
    if type(value) in (list, tuple):
        return type(value)(_interned(item) for item in value)
    if type(value) is dict:
        return {_interned(key): _interned(item) for key, item in value.items()}
    if isinstance(value, argparse.Namespace):
        return argparse.Namespace(**_interned(vars(value)))
    return value


class Inert:
    """Stands in for an object whose class is not here (Megatron's enums and options); it does nothing."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.state = state


_INERT_MODULES = ("megatron", "signal", "pathlib", "types", "numpy")
_LOADABLE: Mapping[str, Any] = {"argparse.Namespace": argparse.Namespace, "_io.BytesIO": io.BytesIO}


def load(data: bytes, where: object) -> Any:
    """The object that torch.save wrote as `data`: plain values, tensors, Namespace, BytesIO, else Inert.

    Raises UnsafePickle for classes of other modules than Megatron and its options are made of, and
    DamagedCheckpoint for what is no archive.
    """
    with _damage(where):
        archive = zipfile.ZipFile(io.BytesIO(data))
        for name in archive.namelist():
            _stored(archive, name)  # torch would inflate the others, to any size
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
        with torch.serialization.safe_globals([_stand_in(name, where) for name in names]):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _stand_in(name: str, where: object) -> tuple[Any, str]:
    if name in _LOADABLE:
        return _LOADABLE[name], name
    if name.split(".")[0] in _INERT_MODULES:
        return Inert, name
    raise UnsafePickle(
        f"a pickle asks for {name}, which is not on the allow-list",
        where=where,
        do="Nothing was executed. If you trust the file, report the name as missing.",
    )


@dataclass(frozen=True)
class _Tensor:
    dtype: torch.dtype
    key: str
    shape: tuple[int, ...]


def _rebuilt(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> _Tensor:
    """Stands in for torch._utils._rebuild_tensor_v2; `storage` is ("storage", dtype, key, device, elements)."""
    expected = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if offset != 0 or any(n > 1 and have != want for n, have, want in zip(shape, stride, expected, strict=True)):
        raise ValueError(f"a view: offset {offset}, shape {list(shape)}, strides {list(stride)}")
    return _Tensor(storage[1], storage[2], tuple(shape))


_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
_TENSOR: safe_pickle.Allowed = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


def _stored(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
        raise ValueError(f"{name} is compressed")
    return entry


_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., length of the name, length of the extra field


def _start_of_data(file: Any, entry: zipfile.ZipInfo) -> int:
    """Where an entry's bytes start: its local header's lengths may differ from the directory's (torch pads there)."""
    file.seek(entry.header_offset)
    signature, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if signature != b"PK\3\4":
        raise ValueError(f"no local header for {entry.filename}")
    return int(entry.header_offset + _LOCAL_HEADER.size + name + extra)


@contextmanager
def _damage(where: object) -> Iterator[None]:
    try:
        yield
    except PrecisionctlError:
        raise
    except Exception as error:  # a damaged archive can raise nearly anything
        raise DamagedCheckpoint(f"not what torch.save writes: {error}", where=where, do="Is the copy whole?") from error


class _Window(io.RawIOBase):
    """Bytes `[offset, offset + length)` of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if self._at < 0:
            raise ValueError("it points before its own start")
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._offset + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


class _AroundHole(io.RawIOBase):
    """Takes what torch.save writes under skip_data, where one relative seek stands for the tensor's bytes."""

    def __init__(self) -> None:
        self.head, self.hole, self.tail = bytearray(), 0, bytearray()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        (self.tail if self.hole else self.head).extend(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_CUR or self.hole:
            raise io.UnsupportedOperation("torch.save lays archives out in another way than it did")
        self.hole = offset
        return len(self.head) + offset
