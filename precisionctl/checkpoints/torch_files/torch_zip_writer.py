"""Write archives of `torch.save`, with holes for the bytes of large tensors, which are written later.

The entries are those of torch.save in another order: first the holes, then everything small. So the offsets of tensors
depend on the tensors alone, and what is only known at the end (FP8 state) can have any size.
"""

from __future__ import annotations

import argparse
import functools
import io
import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precisionctl.checkpoints.output import FileLayout
from precisionctl.checkpoints.torch_files.torch_zip_records import ALIGNMENT, lay_out_records
from precisionctl.dtypes import DType
from precisionctl.torch_when_used import torch
from precisionctl.untrusted.pickle_writer import Global, PersistentId, PickledObject, dumps
from precisionctl.untrusted.safe_pickle import STORAGES


@dataclass(frozen=True, eq=False)
class Blank:
    """Stands for a contiguous tensor whose bytes are written later. The same Blank in two places is a shared tensor."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class SmallTensor:
    """Stands for a contiguous tensor with these row-major bytes, where torch.Tensor would need PyTorch."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, number: float) -> SmallTensor:
        """A number in FP32, in a tensor of no dimension."""
        return cls(DType.float32, (), struct.pack("=f", number))


EMPTY = SmallTensor(DType.uint8, (0,), b"")
"""The payload that Megatron stores for a module without FP8 state."""


@dataclass(frozen=True)
class TensorArchive:
    """The archive of one tensor: `head`, then its `nbytes` bytes, then `tail`."""

    head: bytes
    nbytes: int
    tail: bytes

    @property
    def length(self) -> int:
        return len(self.head) + self.nbytes + len(self.tail)


def lay_out(value: object) -> FileLayout[Blank]:
    """The archive of an object made of lists, tuples, dicts, OrderedDicts, Namespaces, tensors, Blanks and plain
    values. A tensor that is there twice is shared; a view becomes contiguous, and an object of another subclass
    (Parameter, torch.Size) one of the class.

    Equal values give equal bytes, and a Blank takes no memory. `holes` depend on the Blanks alone.
    """
    blanks: dict[Blank, str] = {}
    _number(value, blanks)
    tensors: list[SmallTensor] = []
    data = dumps(_for_pickle(value, blanks, tensors, {}), protocol=2)
    holes = ((f"data/{name}", blank.nbytes) for blank, name in blanks.items())
    records = lay_out_records([*holes, *_records(data, tensors, len(blanks))])
    return FileLayout(records.pieces, dict(zip(blanks, records.holes, strict=True)), records.length)


def dump(value: object) -> bytes:
    """The archive of `lay_out` as bytes, for an object without Blanks."""
    ((_, archive),) = lay_out(value).pieces
    return archive


def _records(data: bytes, tensors: Sequence[SmallTensor], first: int) -> Iterator[tuple[str, bytes]]:
    """The records of torch.save for a pickle and its tensors, whose names count from `first`."""
    yield "data.pkl", data
    for name, text in ((".format_version", "1"), (".storage_alignment", str(ALIGNMENT)), ("byteorder", sys.byteorder)):
        yield name, text.encode()
    for number, tensor in enumerate(tensors, first):
        yield f"data/{number}", tensor.data


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


def _for_pickle(
    value: Any, blanks: Mapping[Blank, str], tensors: list[SmallTensor], shared: dict[int, object]
) -> object:
    """Translate a value into one that `pickle_writer` takes. Tensors are added to `tensors` and named after the Blanks;
    `shared` has PyTorch's tensors by `id`."""
    translated = functools.partial(_for_pickle, blanks=blanks, tensors=tensors, shared=shared)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes):  # torch.load with weights_only knows no opcode for them
        return PickledObject(_ENCODE, (value.decode("latin1"), "latin1"))
    if isinstance(value, Blank):
        return _tensor(value, blanks[value])
    if isinstance(value, SmallTensor):
        tensors.append(value)
        return _tensor(value, str(len(blanks) + len(tensors) - 1))
    if isinstance(value, DType):
        return _DTYPES[value]
    if isinstance(value, io.BytesIO):
        return PickledObject(_BYTES_IO, (), new=True, fields=(translated(value.getvalue()), 0, None))
    if isinstance(value, argparse.Namespace):
        fields: Any = translated(vars(value))
        return PickledObject(_NAMESPACE, (), new=True, fields=fields or None)
    if isinstance(value, dict):
        items = {translated(key): translated(item) for key, item in value.items()}
        return PickledObject(_ORDERED_DICT, (), items=items) if isinstance(value, OrderedDict) else items
    if isinstance(value, list | tuple):
        listed = [translated(item) for item in value]
        return tuple(listed) if isinstance(value, tuple) else listed
    if isinstance(value, torch.Tensor):
        if id(value) not in shared:
            data = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
            shared[id(value)] = translated(SmallTensor(DType.of(value.dtype), tuple(value.shape), data))
        return shared[id(value)]
    return translated(DType.of(value)) if isinstance(value, torch.dtype) else value


def _tensor(tensor: Blank | SmallTensor, name: str) -> PickledObject:
    """A contiguous tensor as PyTorch pickles it."""
    shape = tensor.shape
    stride = tuple(math.prod(max(n, 1) for n in shape[axis + 1 :]) for axis in range(len(shape)))
    storage = PersistentId(("storage", _STORAGE_CLASSES[tensor.dtype], name, "cpu", math.prod(shape)))
    return PickledObject(_REBUILD, (storage, 0, shape, stride, False, PickledObject(_ORDERED_DICT, ())))


_REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
_ORDERED_DICT = Global("collections", "OrderedDict")
_ENCODE = Global("_codecs", "encode")
_BYTES_IO = Global("_io", "BytesIO")
_NAMESPACE = Global("argparse", "Namespace")
_DTYPES = {dtype: Global("torch", dtype.value) for dtype in DType}
_STORAGE_CLASSES = {dtype: Global(*name) for name, dtype in STORAGES.items()}


@functools.cache
def record(dtype: DType, shape: tuple[int, ...]) -> TensorArchive:
    """The archive of one tensor of this dtype and shape, as `lay_out` makes it."""
    archive = lay_out(Blank(dtype, shape))
    (hole,) = archive.holes.values()
    head = b"".join(piece for start, piece in archive.pieces if start < hole)
    tail = b"".join(piece for start, piece in archive.pieces if start >= hole)
    return TensorArchive(head, archive.length - len(head) - len(tail), tail)
