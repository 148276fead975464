"""`.metadata` of PyTorch's distributed checkpoints (DCP): which file holds which box of which tensor.

It is a pickle of PyTorch's classes, and of Megatron's in some versions, or OLMo-core's. It is read into inert stand-ins
and checked. It is written opcode by opcode: equal content gives equal bytes, and `torch.distributed` is not needed.
"""

import itertools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.torch_files.torch_zip import Span
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, damage, shown
from precisionctl.untrusted import safe_pickle
from precisionctl.untrusted.pickle_machine import LONGEST_KEY
from precisionctl.untrusted.pickle_writer import Global, LazyDict, LazyList, PickledObject, dump
from precisionctl.untrusted.safe_files import check_file, read_file
from precisionctl.untrusted.safe_pickle import itself, sizes

FILE = ".metadata"
_MAX_BYTES = 1_000_000_000


@dataclass(frozen=True, slots=True)
class DcpPiece:
    """A piece of a tensor: its offset and size in each dimension, and the bytes of the archive that holds it; those of
    its elements, row by row, if it is `bare`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: Span
    bare: bool = False


@dataclass(frozen=True)
class DcpTensor:
    """A tensor as `.metadata` describes it, in pieces."""

    shape: tuple[int, ...]
    dtype: DType
    pieces: tuple[DcpPiece, ...]


@dataclass(frozen=True)
class Index:
    """What a directory holds, by key: tensors in pieces, and archives of pickled objects. `keys_above` says of what was
    saved in a dict of dicts under which of the outer one's keys it was, with which its own begins."""

    tensors: Mapping[str, DcpTensor]
    objects: Mapping[str, Span]
    keys_above: Mapping[str, str] = field(default_factory=dict)


class _Plain:
    """Stands in for a dataclass: whatever fields were pickled become attributes."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__ = state
        else:
            self.args = state


class _Tensor(_Plain):
    """Stands in for TensorStorageMetadata."""


class _Object(_Plain):
    """Stands in for BytesStorageMetadata."""


class _MetadataIndex(_Plain):
    """Stands in for the key of a tensor's piece or of an object. `write_index` pickles it as a call with arguments, so
    that it can be hashed as soon as it is made."""

    offset: tuple[int, ...] | None = None  # not in the pickle of an object's key

    def __init__(self, fqn: str = "", offset: tuple[int, ...] | None = None) -> None:
        self.fqn, self.offset = fqn, offset


class _Allowed(dict[tuple[str, str], Any]):
    """The classes that may be in `.metadata`. Megatron's (MCoreMetadata, MCoreSavePlan) become `_Plain`, as nothing of
    them is needed."""

    def __missing__(self, key: tuple[str, str]) -> Any:
        if key[0].startswith("megatron."):
            return _Plain
        raise KeyError(key)


_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_PLANNER = "torch.distributed.checkpoint.planner"
_OLMO_CORE = "olmo_core.distributed.checkpoint.filesystem"
_PLAIN = {
    _METADATA: ("Metadata", "ChunkStorageMetadata", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    _FILESYSTEM: ("_StorageInfo",),
    _OLMO_CORE: ("_StorageInfo",),  # a copy of PyTorch's
    _PLANNER: ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    "pathlib": ("PosixPath",),  # the path of the directory that was written
    "pathlib._local": ("PosixPath",),  # the same, as Python 3.13 calls it
}
_ALLOWED = _Allowed(
    {
        (_METADATA, "TensorStorageMetadata"): _Tensor,
        (_METADATA, "BytesStorageMetadata"): _Object,
        (_METADATA, "MetadataIndex"): _MetadataIndex,
        **{(module, name): _Plain for module, names in _PLAIN.items() for name in names},
        **safe_pickle.DTYPES,
        ("torch", "Size"): itself,
        ("torch.serialization", "_get_layout"): itself,
    }
)


def read_index(directory: Path) -> Index:
    """Read `.metadata` and check that every piece lies inside a file of the directory.

    Raises DamagedCheckpoint for an index that contradicts itself or its files, UnsafePickle for other classes than
    PyTorch's, Megatron's and OLMo-core's. Tensor data is not read.
    """
    path = directory / FILE
    return parse_index(read_file(path, directory, _MAX_BYTES), _Files(directory).whole, path)


def parse_index(data: bytes, whole: Callable[[str], Span], path: Path) -> Index:
    """As `read_index`, but of the bytes of `.metadata`. `whole` returns the span of all of a file, given its name;
    `path` is for errors."""
    root = safe_pickle.loads(data, _ALLOWED, path)
    left = len(data)
    with damage("not what PyTorch writes", path):
        infos = {}
        for index, info in root.storage_data.items():
            infos[_text(index.fqn), None if index.offset is None else _hashed(sizes(index.offset))] = info
        tensors, objects = {}, {}
        for key, entry in root.state_dict_metadata.items():
            _text(key)
            if isinstance(entry, _Object):
                objects[key] = _span(infos[key, None], whole)
                continue
            boxes: dict[tuple[bytes, bytes], tuple[tuple[int, ...], tuple[int, ...]]] = {}
            for chunk in entry.chunks:
                # Two bytes are enough to give the pieces of one tensor to another, too
                left -= 1 + len(chunk.offsets) + len(chunk.sizes)
                if left < 0:
                    raise ValueError("the same pieces over and over")
                offsets, lengths = sizes(chunk.offsets), sizes(chunk.sizes)
                boxes[_hashed(offsets), _hashed(lengths)] = offsets, lengths
            pieces = tuple(DcpPiece(*box, _span(infos[key, at], whole)) for (at, _), box in boxes.items())
            value = entry.properties.args[0]
            if not isinstance(value, DType):
                raise ValueError(f"{shown(value)} as a dtype")

            # Before memory of these sizes is allocated: each piece must be inside its tensor and its file, and
            # together they must have as many elements as the tensor. The reader checks for overlaps.
            tensor = tensors[key] = DcpTensor(sizes(entry.size), value, pieces)
            for piece in tensor.pieces:
                ends = [offset + size for offset, size in zip(piece.offsets, piece.sizes, strict=True)]
                if any(end > length for end, length in zip(ends, tensor.shape, strict=True)):
                    raise ValueError(f"{key} has a piece outside itself")
                if math.prod(piece.sizes) * tensor.dtype.itemsize > piece.span.length:
                    raise ValueError(f"{key} has a piece {piece.sizes} in {piece.span.length} bytes")
            stored = sum(math.prod(piece.sizes) for piece in tensor.pieces)
            if not tensor.pieces or stored != math.prod(tensor.shape):
                raise ValueError(f"{key} has pieces of another size than itself")
        check_apart(objects.items(), path)
        return Index(tensors, objects, _keys_above(tensors, getattr(root, "planner_data", None)))


def _keys_above(keys: Iterable[str], paths: object) -> dict[str, str]:
    """The outer keys that PyTorch's planner (`flatten_state_dict`) tells of, of entries two dicts deep. Lengths are
    compared first: two bytes are enough to give a long text to another key, too."""
    found: dict[str, str] = {}
    if not isinstance(paths, dict):
        return found
    for key in keys:
        match paths.get(key):
            case (str(above), str(name)) if len(key) == len(above) + 1 + len(name) and key == f"{above}.{name}":
                found[key] = above
    return found


def check_apart(spans: Iterable[tuple[str, Span]], where: Path) -> None:
    """Raise DamagedCheckpoint if two keys share bytes. Otherwise a small file could stand for any number of large
    tensors."""
    placed = sorted((str(span.path), span.offset, span.length, key) for key, span in spans)
    for (path, start, length, key), (next_path, next_start, _, other) in itertools.pairwise(placed):
        if path == next_path and next_start < start + length:
            what = f"`{key}` and `{other}` are on the same bytes"
            raise DamagedCheckpoint(what, where=where, do="No trainer saves that: do not trust it.")


def _hashed(numbers: tuple[int, ...]) -> bytes:
    """Numbers as bytes, to be keys of a dict. Python hashes bytes with a secret, so a file cannot choose keys that all
    have one hash."""
    return struct.pack(f"{len(numbers)}q", *numbers)


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > LONGEST_KEY:
        raise ValueError(f"{shown(value)} as a name")
    return value


def _span(info: Any, whole: Callable[[str], Span]) -> Span:
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"bytes transformed by {shown(info.transform_descriptors)}")
    offset, length = sizes((info.offset, info.length))
    file = whole(_text(info.relative_path))
    if offset + length > file.length:
        raise DamagedCheckpoint(
            f"bytes {offset} to {offset + length} are needed of a file of {file.length} bytes",
            where=file.path,
            do="It is truncated; copy the checkpoint again.",
        )
    return Span(file.path, file.offset + offset, length)


class _Files:
    """The files of a directory, each looked up once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()
        self._found: dict[str, Span] = {}

    def whole(self, relative: str) -> Span:
        """All of a file. Raises DamagedCheckpoint for one that is missing or outside the directory."""
        if relative in self._found:
            return self._found[relative]
        if Path(relative).is_absolute() or ".." in Path(relative).parts:
            what = f"{FILE} names a file outside its directory: {shown(relative)}"
            raise DamagedCheckpoint(what, where=self._directory, do="Do not trust it.")
        path = self._directory / relative
        check_file(path, self._directory)
        span = self._found[relative] = Span(path, 0, path.stat().st_size)
        return span


Paths = Mapping[str, tuple[str | int, ...]]
"""Where in a nested state dict each key's value is."""


def write_index(directory: Path, index: Index, paths: Paths | None = None) -> None:
    """Write `.metadata` into `directory`, in which the pieces' files must be. Equal indexes give equal bytes."""
    metadata = _object(
        *(_METADATA, "Metadata"),
        state_dict_metadata=LazyDict(_entries(index)),
        planner_data=None if paths is None else LazyDict(paths.items()),
        storage_data=LazyDict(_storage(index)),
        storage_meta=_object(_METADATA, "StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[]),
        version="1.0.0",
    )
    with open(directory / FILE, "wb") as file:
        dump(metadata, file)


def _entries(index: Index) -> Iterator[tuple[str, PickledObject]]:
    for key, tensor in index.tensors.items():
        chunks = LazyList(
            _object(_METADATA, "ChunkStorageMetadata", offsets=_size(piece.offsets), sizes=_size(piece.sizes))
            for piece in tensor.pieces
        )
        dtype = Global("torch", tensor.dtype.value)
        layout = PickledObject(Global("torch.serialization", "_get_layout"), ("torch.strided",))
        contiguous = PickledObject(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
        state = (dtype, layout, False, contiguous, False)  # ..., requires_grad, memory format, pinned
        properties = PickledObject(Global(_METADATA, "TensorProperties"), (), new=True, fields=state)
        yield (
            key,
            _object(_METADATA, "TensorStorageMetadata", properties=properties, size=_size(tensor.shape), chunks=chunks),
        )
    for key in index.objects:
        yield key, _object(_METADATA, "BytesStorageMetadata")


def _storage(index: Index) -> Iterator[tuple[PickledObject, PickledObject]]:
    for key, tensor in index.tensors.items():
        for piece in tensor.pieces:
            yield _metadata_index(key, _size(piece.offsets)), _storage_info(piece.span)
    for key, span in index.objects.items():
        yield _metadata_index(key, None), _storage_info(span)


def _metadata_index(key: str, offset: PickledObject | None) -> PickledObject:
    return PickledObject(Global(_METADATA, "MetadataIndex"), (key, offset))


def _storage_info(span: Span) -> PickledObject:
    return _object(_FILESYSTEM, "_StorageInfo", relative_path=span.path.name, offset=span.offset, length=span.length)


def _object(module: str, name: str, **fields: object) -> PickledObject:
    return PickledObject(Global(module, name), (), new=True, fields=fields)


def _size(values: tuple[int, ...]) -> PickledObject:
    return PickledObject(Global("torch", "Size"), (values,))
