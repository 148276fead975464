"""Pickles from strangers, read with an allow-list: no name outside it is ever looked up.

A pickle is a program. `loads` runs it on a virtual machine whose only verbs are the callables that
the caller lists, so the worst a hostile file can do is to raise UnsafePickle or DamagedCheckpoint.
What a caller lists must not hash, compare, copy or print its arguments: two bytes make a tuple of a tuple
twice, so that a hundred bytes make one that has 2**50 parts when it is walked.
"""

import argparse
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor

from precisionctl.errors import DamagedCheckpoint, UnsafePickle, shown

Allowed = Mapping[tuple[str, str], Any]
"""(module, qualified name) as the pickle spells it -> what stands in for it here."""

PersistentLoad = Callable[[Any], Any]
"""A persistent id (a storage of torch.save) -> what stands in for it here."""


def loads(data: bytes, allowed: Allowed, where: object, persistent: PersistentLoad | None = None) -> Any:
    """The object that `data` pickles, built from nothing but `allowed` and plain containers.

    `where` names the source in errors. Raises UnsafePickle for a name outside `allowed` and
    DamagedCheckpoint for bytes that are no pickle.
    """
    if not data.endswith(pickle.STOP):  # else a name that is cut short looks like one that is not allowed
        raise DamagedCheckpoint("a pickle is cut short", where=where, do="Is the copy whole?")
    return load(io.BytesIO(data), allowed, where, persistent)


def load(file: BinaryIO, allowed: Allowed, where: object, persistent: PersistentLoad | None = None) -> Any:
    """As `loads`, of the next pickle in a file."""
    try:
        return _AllowListUnpickler(file, allowed, where, persistent).load()
    except UnsafePickle:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DamagedCheckpoint(f"a pickle does not load: {type(error).__name__}: {error}", where=where) from error


STORAGES: Mapping[tuple[str, str], torch.dtype] = {
    ("torch", "BFloat16Storage"): torch.bfloat16,
    ("torch", "BoolStorage"): torch.bool,
    ("torch", "ByteStorage"): torch.uint8,
    ("torch", "CharStorage"): torch.int8,
    ("torch", "DoubleStorage"): torch.float64,
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "IntStorage"): torch.int32,
    ("torch", "LongStorage"): torch.int64,
    ("torch", "ShortStorage"): torch.int16,
}
"""PyTorch's classes of storages, for an allow-list; each stands for the dtype of its elements."""


def itself(value: Any) -> Any:
    """Stands in for a class or function of one argument whose result is not needed: it returns the argument."""
    return value


def ordered_dict() -> OrderedDict[Any, Any]:
    """Stands in for OrderedDict, which pickles as an empty one that is filled afterwards."""
    return OrderedDict()


def plain_set(items: list[Any]) -> set[Any]:
    """Stands in for `set`, which pickles as a call before protocol 4."""
    _check_keys(items)
    return set(items)


def strided(values: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """The tensor that PyTorch's pickles describe within the flat `values` of a storage.

    Raises ValueError, RuntimeError or TypeError for one that is not within it.
    """
    tensor = values.as_strided(size, stride, offset)
    if tensor.numel() > values.numel():  # strides of zero would make gigabytes out of nothing
        raise ValueError("a tensor is larger than its storage")
    return tensor


def sizes(values: Any) -> tuple[int, ...]:
    """A shape, or a place in one, after checking that it is one. Raises ValueError."""
    plain = type(values) in (tuple, list) and len(values) <= 64
    if not plain or not all(type(value) is int and 0 <= value < 1 << 63 for value in values):
        raise ValueError(f"{shown(values)} as sizes")
    return tuple(values)


_MOST_PARTS = 1 << 21
_DEEPEST = 100


def finite(value: Any) -> Any:
    """The value itself, where walking through its lists, tuples, tables and Namespaces ends.

    Raises ValueError where there are more than 2**21 ways to a part, or it is deeper than 100: lists of lists that are
    one and the same are small to say and endless to walk. Here each is walked once.
    """
    _ways(value, 0, {})
    return value


def _ways(value: Any, depth: int, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """How many ways there are to parts of it, itself among them, and how deep it is."""
    found = known.get(id(value), (1, 0))
    if id(value) not in known and depth <= _DEEPEST:
        for part in _inside(value):
            ways, deep = _ways(part, depth + 1, known) if _is_container(part) else (1, 0)
            found = found[0] + ways, max(found[1], deep + 1)
        if _is_container(value):
            known[id(value)] = found
    if found[0] > _MOST_PARTS or depth + found[1] > _DEEPEST:
        raise ValueError("containers in one another without end")
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
    """What is in containers in one another that are `finite`, each as often as there are ways to it."""
    if _is_container(value):
        for part in _inside(value):
            yield from parts(part)
    else:
        yield value


_SCALARS = (str, bytes, int, float, bool, type(None))


def _check_keys(keys: Iterable[Any]) -> None:
    """Raise UnpicklingError for one whose hash may take for ever: allowed are scalars, flat tuples and identities."""
    for key in keys:
        parts = key if type(key) is tuple else (key,)
        if not all(type(part) in _SCALARS or _hashes_by_identity(type(part)) for part in parts):
            raise pickle.UnpicklingError(f"{shown(key)} as a key")


def _hashes_by_identity(kind: Any) -> bool:
    return kind.__hash__ is object.__hash__


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
"""Opcodes that hash, and where on the stack what they hash is."""


_CONTAINERS = (list, tuple, set, frozenset, dict)
_TEXTS = (str, bytes)


def _copying(load: Callable[[Any], None], *, call: bool) -> Callable[[Any], None]:
    def checked(unpickler: Any) -> None:
        value = unpickler.stack[-1]
        if call and type(value) is not tuple:
            raise pickle.UnpicklingError(f"{shown(value)} as arguments")
        # How many parts a copy of a call's arguments, or of a state, can have: its own, and those of what it holds.
        # Eight letters are one: an array of NumPy's is copied twice on its way from text to bytes to itself
        count = 0
        for part in value if type(value) is tuple else (value,):
            if isinstance(part, _CONTAINERS):
                count += len(part)
            elif isinstance(part, _TEXTS):
                count += len(part) // 8
            count += 1
        unpickler._left -= count
        if unpickler._left < 0:
            raise pickle.UnpicklingError("it copies its parts over and over")
        load(unpickler)

    return checked


_COPYING = {pickle.REDUCE: True, pickle.NEWOBJ: True, pickle.BUILD: False, pickle.BINPERSID: False}
"""Opcodes that may copy what is on the stack, which two bytes can put there again, and whether those are arguments."""


def _may_become(changed: Any, state: Any) -> bool:
    """Whether an object takes this state without any attribute that is looked up on it, `__class__` not least,
    becoming another."""
    kind = type(changed)
    if kind is argparse.Namespace:
        return type(state) is dict
    if kind is io.BytesIO:
        return type(state) is tuple and len(state) == 3 and state[2] is None
    return hasattr(kind, "__setstate__")


class _AllowListUnpickler(pickle._Unpickler):
    """CPython's unpickler in Python. The one in C sizes its memo by the largest index, so that six bytes can ask
    for gigabytes, and its BUILD cannot be held back from changing what is allowed for everyone after this file."""

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch}
    for _opcode, _keys in _HASHING.items():
        dispatch[_opcode[0]] = _hashing(dispatch[_opcode[0]], _keys)
    del dispatch[pickle.BYTEARRAY8[0]]  # it fills as much memory as it names before it reads a byte
    del dispatch[pickle.NEWOBJ_EX[0]]  # nothing that is allowed takes arguments by name

    def load_build(self) -> None:
        changed = self.stack[-2]  # type: ignore[attr-defined]
        if callable(changed):
            raise UnsafePickle(f"a pickle changes {changed!r}, a class or function", where=self._where)
        if isinstance(changed, Tensor):  # its state says how large its storage becomes
            raise UnsafePickle("a pickle changes a tensor", where=self._where)
        state = self.stack[-1]  # type: ignore[attr-defined]
        if isinstance(changed, dict):  # `_metadata` of a module's state; but also `get`, `items` and `__class__`
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
        # In proportion to the file: what Megatron, PyTorch and Transformer Engine write takes a quarter of its size
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
