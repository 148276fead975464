"""Load pickles from strangers with an allow-list: no name outside it is ever looked up.

A pickle is a program. `loads` runs it on an unpickler that can only call what the caller lists, so the worst that a
hostile file can do is to raise UnsafePickle or DamagedCheckpoint. Callables on the list must not hash, compare, copy or
print their arguments: two bytes make a tuple that contains the same tuple twice, so a hundred bytes make one that takes
2**50 steps to walk.
"""

from __future__ import annotations

import argparse
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, TypeGuard

from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, UnsafePickle, shown

if TYPE_CHECKING:
    from torch import Tensor

Allowed = Mapping[tuple[str, str], Any]
"""(module, qualified name) as in the pickle -> the object to use for it."""

PersistentLoad = Callable[[Any], Any]
"""A persistent id (which torch.save uses for storages) -> the object to use for it."""


def loads(data: bytes, allowed: Allowed, where: object, persistent: PersistentLoad | None = None) -> Any:
    """Unpickle `data` with nothing but `allowed` and plain containers.

    `where` names the source in errors. Raises UnsafePickle for a name outside `allowed`, DamagedCheckpoint for bytes
    that are not a pickle.
    """
    if not data.endswith(pickle.STOP):  # so that a truncated name is not taken for a forbidden one
        raise DamagedCheckpoint("a pickle is cut short", where=where, do="Is the copy whole?")
    return load(io.BytesIO(data), allowed, where, persistent)


def load(file: BinaryIO, allowed: Allowed, where: object, persistent: PersistentLoad | None = None) -> Any:
    """As `loads`, for the next pickle in a file."""
    try:
        return _AllowListUnpickler(file, allowed, where, persistent).load()
    except UnsafePickle:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DamagedCheckpoint(f"a pickle does not load: {type(error).__name__}: {error}", where=where) from error


STORAGES: Mapping[tuple[str, str], DType] = {
    ("torch", "BFloat16Storage"): DType.bfloat16,
    ("torch", "BoolStorage"): DType.bool,
    ("torch", "ByteStorage"): DType.uint8,
    ("torch", "CharStorage"): DType.int8,
    ("torch", "DoubleStorage"): DType.float64,
    ("torch", "FloatStorage"): DType.float32,
    ("torch", "HalfStorage"): DType.float16,
    ("torch", "IntStorage"): DType.int32,
    ("torch", "LongStorage"): DType.int64,
    ("torch", "ShortStorage"): DType.int16,
}
"""PyTorch's storage classes, for an allow-list; each is replaced by the dtype of its elements."""

DTYPES: Mapping[tuple[str, str], DType] = {("torch", dtype.value): dtype for dtype in DType}
"""PyTorch's dtypes, for an allow-list."""


def itself(value: Any) -> Any:
    """Stands in for a class or function of one argument whose result is not needed: it returns the argument."""
    return value


def ordered_dict() -> OrderedDict[Any, Any]:
    """Stands in for OrderedDict, which is pickled as an empty one that is filled afterwards."""
    return OrderedDict()


def plain_set(items: list[Any]) -> set[Any]:
    """Stands in for `set`, which is pickled as a call before protocol 4."""
    _check_keys(items)
    return set(items)


def strided(values: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """The view of a storage (flat `values`) that a pickled tensor describes, with offset and stride in elements.

    Raises ValueError, RuntimeError or TypeError for a view that is not within the storage.
    """
    tensor = values.as_strided(size, stride, offset)
    if tensor.numel() > values.numel():  # strides of zero could describe gigabytes
        raise ValueError("a tensor is larger than its storage")
    return tensor


def is_count(value: object) -> TypeGuard[int]:
    """Whether it is an integer of 0 or above, of at most 63 bits."""
    return type(value) is int and 0 <= value < 1 << 63


def sizes(values: Any) -> tuple[int, ...]:
    """A shape or an offset per dimension, as a tuple. Raises ValueError for anything but at most 64 integers of 0 or
    above."""
    plain = type(values) in (tuple, list) and len(values) <= 64
    if not plain or not all(map(is_count, values)):
        raise ValueError(f"{shown(values)} as sizes")
    return tuple(values)


_MOST_PARTS = 1 << 21
_DEEPEST = 100
"""Limits for `finite`."""


def finite(value: Any) -> Any:
    """Return the value if recursion over its lists, tuples, dicts and Namespaces is bounded.

    Raises ValueError if it would visit more than 2**21 values or nest deeper than 100: a list that contains the same
    list many times is small, but takes exponential time to walk. Here each object is visited only once.
    """
    _ways(value, 0, {})
    return value


def _ways(value: Any, depth: int, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """The number of values that recursion over `value` would visit, with itself, and its depth."""
    found = known.get(id(value), (1, 0))
    if id(value) not in known and depth <= _DEEPEST:
        for part in _inside(value):
            ways, deep = _ways(part, depth + 1, known) if _is_container(part) else (1, 0)
            found = found[0] + ways, max(found[1], deep + 1)
        if _is_container(value):
            known[id(value)] = found
    if found[0] > _MOST_PARTS or depth + found[1] > _DEEPEST:
        raise ValueError("containers that are nested without end")
    return found


def _is_container(value: Any) -> bool:
    return type(value) in (list, tuple, argparse.Namespace) or isinstance(value, Mapping)


def _inside(value: Any) -> Iterable[Any]:
    if type(value) is argparse.Namespace:
        value = vars(value)
    if isinstance(value, Mapping):
        return (part for pair in value.items() for part in pair)
    return value if type(value) in (list, tuple) else ()


def parts(value: Any) -> Iterator[Any]:
    """All values in nested containers, which must be `finite`, by recursion."""
    if _is_container(value):
        for part in _inside(value):
            yield from parts(part)
    else:
        yield value


_TEXTS = (str, bytes)
_SCALARS = (*_TEXTS, int, float, bool, type(None))
_MODULUS = (1 << 61) - 1
"""An integer's hash is its remainder by this number."""


def _check_keys(keys: Iterable[Any]) -> None:
    """Raise UnpicklingError for a key whose hash could take forever, or be that of many others: a table of these takes
    time quadratic in their number. Allowed are scalars, objects that hash by identity or as members of an enum, and
    flat tuples of texts and such objects. Numbers' hashes have no secret: large ones, and tuples, can be chosen to have
    the same."""
    for key in keys:
        if type(key) is tuple:
            known = all(type(part) in _TEXTS or _hashes_at_once(type(part)) for part in key)
        elif type(key) is int:
            known = abs(key) < _MODULUS
        else:
            known = type(key) in _SCALARS or _hashes_at_once(type(key))
        if not known:
            raise pickle.UnpicklingError(f"{shown(key)} as a key")


def _hashes_at_once(kind: Any) -> bool:
    return kind.__hash__ in (object.__hash__, Enum.__hash__)


def _hashing(load: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    def checked(unpickler: Any) -> None:
        _check_keys(unpickler.stack[keys])
        load(unpickler)

    return checked


_HASHING = {
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(None, None, 2),
    pickle.DICT: slice(None, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}
"""Opcodes that hash, and the place on the stack of what they hash."""


_CONTAINERS = (list, tuple, set, frozenset, dict)


def _copying(load: Callable[[Any], None], *, call: bool) -> Callable[[Any], None]:
    def checked(unpickler: Any) -> None:
        value = unpickler.stack[-1]
        if call and type(value) is not tuple:
            raise pickle.UnpicklingError(f"{shown(value)} as arguments")
        # The number of values that copying these arguments, or this state, may take: its items, and the items of
        # containers among them. Eight characters count as one, as NumPy arrays are copied twice (text, bytes, array)
        count = 0
        for part in value if type(value) is tuple else (value,):
            if isinstance(part, _CONTAINERS):
                count += len(part)
            elif isinstance(part, _TEXTS):
                count += len(part) // 8
            count += 1
        unpickler._left -= count
        if unpickler._left < 0:
            raise pickle.UnpicklingError("it copies the same values over and over")
        load(unpickler)

    return checked


_COPYING = {pickle.REDUCE: True, pickle.NEWOBJ: True, pickle.BUILD: False, pickle.BINPERSID: False}
"""Opcodes after which a callable may copy the top of the stack (two bytes can put the same value there again), and
whether that value is the arguments of a call."""


def _may_become(changed: Any, state: Any) -> bool:
    """Whether BUILD may give an object this state: only if that cannot replace attributes that Python itself looks up,
    such as `__class__`."""
    kind = type(changed)
    if kind is argparse.Namespace:
        return type(state) is dict
    if kind is io.BytesIO:
        return type(state) is tuple and len(state) == 3 and state[2] is None
    return hasattr(kind, "__setstate__")


class _AllowListUnpickler(pickle._Unpickler):
    """CPython's Python unpickler with checks. The one in C cannot be used: it allocates its memo by the largest index,
    so that six bytes can ask for gigabytes, and its BUILD could modify the allowed callables for all later files."""

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch}
    for _opcode, _keys in _HASHING.items():
        dispatch[_opcode[0]] = _hashing(dispatch[_opcode[0]], _keys)
    del dispatch[pickle.BYTEARRAY8[0]]  # it allocates the size that it is given before it reads a byte
    del dispatch[pickle.NEWOBJ_EX[0]]  # nothing on the allow-lists takes keyword arguments

    def load_build(self) -> None:
        changed = self.stack[-2]  # type: ignore[attr-defined]
        if callable(changed):
            raise UnsafePickle(f"a pickle changes {changed!r}, a class or function", where=self._where)
        if hasattr(type(changed), "untyped_storage"):  # a tensor, whose state could resize its storage
            raise UnsafePickle("a pickle changes a tensor", where=self._where)
        state = self.stack[-1]  # type: ignore[attr-defined]
        if isinstance(
            changed, dict
        ):  # drop the state: `_metadata` of a state dict, but it could also be `get`, `items`
            self.stack.pop()  # type: ignore[attr-defined]
        elif _may_become(changed, state):
            super().load_build()  # type: ignore[misc]
        else:
            raise UnsafePickle(f"a pickle changes {shown(changed)}", where=self._where)

    dispatch[pickle.BUILD[0]] = load_build
    for _opcode, _call in _COPYING.items():
        dispatch[_opcode[0]] = _copying(dispatch[_opcode[0]], call=_call)

    def __init__(self, file: BinaryIO, allowed: Allowed, where: object, persistent: PersistentLoad | None) -> None:
        super().__init__(file)
        start = file.tell()
        # How many values may be copied: in proportion to the file, eight times what the files of Megatron, PyTorch and
        # Transformer Engine need
        self._left = 2 * file.seek(0, io.SEEK_END)
        file.seek(start)
        self._allowed = allowed
        self._where = where
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._allowed[module, name]
        except KeyError:
            raise UnsafePickle(
                f"a pickle asks for {module}.{name}, which is not on the allow-list",
                where=self._where,
                do="Nothing was executed. If you trust the file, report the name as missing.",
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it refers to something outside itself")
        return self._persistent(pid)
