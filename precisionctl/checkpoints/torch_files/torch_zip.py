"""Read archives of `torch.save` without torch.load: where tensors' bytes are, and objects made of plain values.

An archive is a ZIP file of uncompressed entries: `data.pkl` pickles the object and refers to its storages by number;
each storage is an entry `data/<number>`. Objects become plain values, tensors and inert stand-ins. torch.load is not
used because its allow-list still lets a few bytes ask for any amount of memory or time. `torch_zip_writer.py` is the
inverse.
"""

from __future__ import annotations

import argparse
import functools
import io
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from precisionctl.checkpoints.torch_files import dtensors, te_tensors
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, DamagedCheckpoint, damage, shown
from precisionctl.sizes import size
from precisionctl.torch_when_used import torch
from precisionctl.untrusted import safe_archive, safe_pickle
from precisionctl.untrusted.safe_archive import MAGIC, WHAT, directory, elements, reference_of, stored
from precisionctl.untrusted.safe_files import check_fetched
from precisionctl.untrusted.safe_pickle import finite, itself, parts, sizes


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `[offset, offset + length)` of a file."""

    path: Path
    offset: int
    length: int

    def __str__(self) -> str:
        return f"{self.path} at byte {self.offset}"

    def read(self) -> bytes:
        """The bytes. Raises DamagedCheckpoint for more than 1 GB, as nothing larger is read at once."""
        if self.length > _MAX_OBJECT:
            raise DamagedCheckpoint(f"an object of {size(self.length)}", where=self, do="Is the copy whole?")
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.length)


class LocatedTensor(NamedTuple):
    """A contiguous tensor whose row-major bytes start at byte `offset` of its file.

    `part` is True if it is a view of a larger storage. It is a tuple because a pickle cannot modify a tuple that it has
    made.
    """

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    part: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StridedTensor(NamedTuple):
    """A tensor whose elements do not stand in row-major order in its file, such as a transposed one. It is a tuple as
    LocatedTensor is."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


def contiguous(value: object, name: str, where: object) -> LocatedTensor:
    """A part of a skeleton, as the tensor `name`. Raises CheckpointError for a tensor that is strided, and
    DamagedCheckpoint for what is none."""
    if isinstance(value, StridedTensor):
        what = f"`{name}` {list(value.shape)} is stored transposed, or as a part of each row (strides {value.strides})"
        raise CheckpointError(what, where=where, do="Save it with .contiguous().")
    if not isinstance(value, LocatedTensor):
        raise DamagedCheckpoint(f"`{name}` is {shown(value)}, not a contiguous tensor", where=where)
    return value


def one_tensor(span: Span, name: str) -> LocatedTensor:
    """Find the tensor that is saved in `span`, reading its archive's directory and pickle only. `name` is for errors.

    Raises as `contiguous`, and DamagedCheckpoint for anything but one whole, plain, uncompressed tensor, UnsafePickle
    for a pickle that asks for other classes.
    """
    tensor = contiguous(_skeleton(span, _TENSOR), name, span)
    if tensor.part:
        raise DamagedCheckpoint(f"`{name}` is a part of what is stored, where PyTorch stores it alone", where=span)
    return tensor


def skeleton(path: Path) -> Any:
    """The object that is saved at `path`, with a LocatedTensor in place of each tensor, whose bytes are not read, or a
    RankShard of one.

    A tensor that is not contiguous becomes a StridedTensor. Raises DamagedCheckpoint for a file that is not such an
    archive, or whose tensors claim many times the stored bytes; UnsafePickle as `load`.
    """
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            check_fetched(path)
            what = "no ZIP archive, as torch.save writes since PyTorch 1.6"
            raise DamagedCheckpoint(what, where=path, do="Is it whole? An older file: load it and save it again.")
    return skeleton_at(Span(path, 0, path.stat().st_size))


def skeleton_at(span: Span) -> Any:
    """As `skeleton`, of the archive in a part of a file."""
    return _skeleton(span, _SKELETON)


def read_located(path: Path, tensor: LocatedTensor) -> torch.Tensor:
    """Read a tensor of a skeleton. Raises DamagedCheckpoint if it has more than 64 MB."""
    length = tensor.nbytes
    if length > _MAX_READ:
        raise DamagedCheckpoint(f"a tensor of {size(length)} where a small one belongs", where=path)
    data = Span(path, tensor.offset, length).read()
    return elements(data, tensor.dtype.torch).reshape(tensor.shape)


def _skeleton(span: Span, allowed: safe_pickle.Allowed) -> Any:
    with damage(WHAT, span), open(span.path, "rb") as file:
        archive, root = directory(_Window(file, span.offset, span.length))

        @functools.cache
        def start(key: str) -> tuple[int, int]:
            entry = stored(archive, f"{root}/data/{key}")
            # An entry's local header has its own lengths: torch.save adds padding there, but not in the directory
            path = entry.orig_filename.encode()
            header = os.pread(file.fileno(), _LOCAL_HEADER.size + len(path), span.offset + entry.header_offset)
            signature, name, extra = _LOCAL_HEADER.unpack_from(header)
            if signature != MAGIC or name != len(path) or header[_LOCAL_HEADER.size :] != path:
                raise ValueError(f"no local header for {entry.filename}")
            begin = int(entry.header_offset + _LOCAL_HEADER.size + name + extra)
            if begin + entry.file_size > span.length:
                raise ValueError("its bytes reach past its end")
            return span.offset + begin, entry.file_size

        def storage(reference: Any) -> _Storage:
            dtype, key = reference_of(reference)
            return _Storage(dtype, *start(key))

        pickled = archive.read(stored(archive, f"{root}/data.pkl"))
        found = finite(safe_pickle.loads(pickled, allowed, span, storage))
        described = sum(one.nbytes for one in _located_in(found))
        if described > _MOST_TIMES * span.length:
            what = f"tensors of {described} bytes that share the bytes of a file of {span.length}"
            raise DamagedCheckpoint(what, where=span, do="No trainer saves that: do not trust it.")
        return found


def _located_in(value: object) -> Iterator[LocatedTensor]:
    """Every tensor that is located in a skeleton, also in what is made of one or two."""
    for one in parts(value):
        match one:
            case LocatedTensor():
                yield one
            case dtensors.RankShard():
                yield from _located_in(one.local)
            case te_tensors.LocatedFp8Weight():
                yield from _located_in([one.codes, one.scale_inv])


class Inert:
    """Stands in for an object of another module's class (enums and options of Megatron and DeepSpeed); it does
    nothing."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.state = state


def _latin1(text: str, encoding: str) -> bytes:
    """Stands in for `_codecs.encode`, which bytes are pickled as before protocol 3."""
    if encoding != "latin1":
        raise ValueError("bytes in another encoding than pickle's")
    return text.encode("latin1")


def _rebuilt(values: torch.Tensor, offset: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    """Stands in for torch._utils._rebuild_tensor_v2."""
    return safe_pickle.strided(values, offset, size, stride)


def _rebuilt_as(
    values: torch.Tensor, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> torch.Tensor:
    """Stands in for torch._utils._rebuild_tensor_v3, of a dtype that has no storage class: `values` are bytes."""
    return safe_pickle.strided(values.view(_checked(dtype).torch), offset, size, stride)


def _checked(dtype: Any) -> DType:
    if not isinstance(dtype, DType):
        raise ValueError(f"{shown(dtype)} as a dtype")
    return dtype


def _parameter(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    """Stands in for torch._utils._rebuild_parameter."""
    return tensor


def _with_attributes(rebuild: Any, _kind: Any, arguments: Any, state: Any) -> Any:
    """Stands in for torch._tensor._rebuild_from_type_v2, of a tensor that carries attributes; a DTensor is made of
    its own."""
    if rebuild is dtensors.wrapper_subclass:
        return dtensors.rebuilt(arguments, state)
    if rebuild not in (_rebuilt, _rebuilt_as, _located, _located_as, _parameter):
        raise ValueError(f"a tensor made by {shown(rebuild)}")
    return rebuild(*arguments)


class _Objects(dict[tuple[str, str], Any]):
    """The classes that may be in an archive: those of plain values, tensors, FP8 weights, and options of Megatron and
    DeepSpeed. All names of the modules in `_INERT` become Inert."""

    _INERT = ("megatron", "deepspeed", "signal", "pathlib", "types", "numpy")

    def __missing__(self, key: tuple[str, str]) -> Any:
        if key[0].split(".")[0] in self._INERT:
            return Inert
        if (found := te_tensors.stand_in(*key)) is not None:
            return found
        raise KeyError(key)


_STORAGES = {**safe_pickle.STORAGES, ("torch.storage", "UntypedStorage"): DType.uint8}
"""As safe_pickle's, and that of FP8 and of unsigned integers of more than 8 bits, which have no class of their own."""

_OBJECTS = _Objects(
    {
        **_STORAGES,
        **safe_pickle.DTYPES,
        ("_codecs", "encode"): _latin1,
        ("_io", "BytesIO"): io.BytesIO,
        ("__builtin__", "set"): safe_pickle.plain_set,
        ("argparse", "Namespace"): argparse.Namespace,
        ("collections", "OrderedDict"): safe_pickle.ordered_dict,
        ("torch", "Size"): itself,
        ("torch", "Tensor"): Inert,
        ("torch", "device"): Inert,
        ("torch._tensor", "_rebuild_from_type_v2"): _with_attributes,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
        ("torch._utils", "_rebuild_tensor_v3"): _rebuilt_as,
        ("torch.nn.parameter", "Parameter"): Inert,
    }
)


def load(data: bytes, where: object) -> Any:
    """The object that torch.save wrote as `data`, made of plain values, DTypes, tensors, Namespace, BytesIO and Inert.

    Raises UnsafePickle for a class that is not on the allow-list, DamagedCheckpoint for bytes that are no archive.
    """
    return safe_archive.loads(data, _OBJECTS, where)


class _Storage(NamedTuple):
    """Bytes of a file that are elements of a dtype."""

    dtype: DType
    offset: int
    nbytes: int


def _located(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> LocatedTensor | StridedTensor:
    """Stands in for torch._utils._rebuild_tensor_v2 where storages are only located, not read."""
    shape = sizes(size)
    (start,) = sizes((offset,))
    begin = start * storage.dtype.itemsize
    length = math.prod(shape) * storage.dtype.itemsize
    strides, expected = sizes(stride), 1
    if len(strides) != len(shape):
        raise ValueError(f"a tensor {shown(shape)} with strides {shown(strides)}")
    for n, have in zip(reversed(shape), reversed(strides), strict=True):
        if n > 1 and have != expected:
            return StridedTensor(shape, strides)
        expected *= max(n, 1)
    if begin + length > storage.nbytes:
        raise ValueError(f"a tensor {shown(shape)} at {shown(offset)} in {storage.nbytes} bytes")
    return LocatedTensor(storage.dtype, shape, storage.offset + begin, part=length != storage.nbytes)


def _located_as(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> LocatedTensor | StridedTensor:
    """As `_located`, of a dtype that has no storage class (torch._utils._rebuild_tensor_v3)."""
    return _located(storage._replace(dtype=_checked(dtype)), offset, size, stride)


_LOCATED: safe_pickle.Allowed = {
    ("torch._utils", "_rebuild_tensor_v2"): _located,
    ("torch._utils", "_rebuild_tensor_v3"): _located_as,
}
_TENSOR: safe_pickle.Allowed = {
    **_STORAGES,
    **safe_pickle.DTYPES,
    **_LOCATED,
    ("collections", "OrderedDict"): safe_pickle.ordered_dict,
}
_SKELETON = _Objects(_OBJECTS | {**dtensors.STAND_INS, **_LOCATED})


_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., length of the name, length of the extra field


_MOST_TIMES = 32
"""How many times its own size the tensors of a file may have together. Tied embeddings are there twice, blocks that all
layers share once for each layer."""
_MAX_OBJECT = 1_000_000_000
"""Most bytes of an object that is read at once."""
_MAX_READ = 64_000_000
"""Most bytes of an archive's directory, of its pickle, and of a small tensor: several times what 10^5 tensors take."""


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

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        if min(left, left if count < 0 else count) > _MAX_READ:  # a sparse file can be large for free
            raise ValueError(f"a directory or pickle of more than {size(_MAX_READ)}")
        self._file.seek(self._offset + self._at)
        data = self._file.read(left if count < 0 else min(count, left))
        self._at += len(data)
        return data
