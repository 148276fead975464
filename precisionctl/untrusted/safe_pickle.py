"""Load pickles from strangers with an allow-list: no name outside it is ever looked up.

A pickle is a program. `loads` runs it on a machine (`pickle_machine.py`) that can only call what the caller lists, so
the worst that a hostile file can do is to raise UnsafePickle or DamagedCheckpoint. Callables on the list must not hash,
compare, copy or print their arguments: two bytes make a tuple that contains the same tuple twice, so a hundred bytes
make one that takes 2**50 steps to walk.
"""

from __future__ import annotations

import argparse
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, UnsafePickle, shown
from precisionctl.untrusted import pickle_machine
from precisionctl.untrusted.pickle_machine import PersistentLoad

if TYPE_CHECKING:
    from torch import Tensor

Allowed = Mapping[tuple[str, str], Any]
"""(module, qualified name) as in the pickle -> the object to use for it."""


def loads(data: bytes, allowed: Allowed, where: object, persistent: PersistentLoad | None = None) -> Any:
    """Unpickle `data` with nothing but `allowed` and plain containers.

    `where` names the source in errors. Raises UnsafePickle for a name outside `allowed`, DamagedCheckpoint for bytes
    that are not a pickle.
    """
    if not data.endswith(pickle.STOP):  # so that a truncated name is not taken for a forbidden one
        raise DamagedCheckpoint("a pickle is cut short", where=where, do="Is the copy whole?")
    return load_from(data, 0, allowed, where, persistent)[0]


def load_from(
    data: bytes, at: int, allowed: Allowed, where: object, persistent: PersistentLoad | None = None
) -> tuple[Any, int]:
    """As `loads`, for one of several pickles, which begins at byte `at`. Returns its value, and the byte behind it."""

    def find_class(module: str, name: str) -> Any:
        try:
            return allowed[module, name]
        except KeyError:
            raise UnsafePickle(
                f"a pickle asks for {module}.{name}, which is not on the allow-list",
                do="Nothing was executed. If you trust the file, report the name as missing.",
            ) from None

    try:
        return pickle_machine.run(data, at, find_class, persistent or _refuse)
    except UnsafePickle as error:
        raise UnsafePickle(error.what, where=where, do=error.do) from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DamagedCheckpoint(f"a pickle does not load: {type(error).__name__}: {error}", where=where) from error


def _refuse(pid: Any) -> Any:
    raise pickle.UnpicklingError("it refers to something outside itself")


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
    """Stands in for `set`, which is pickled as a call with a list before protocol 4. Raises UnpicklingError for
    anything else: a text of a thousand letters would become a set for each two bytes that refer to it."""
    if type(items) is not list:
        raise pickle.UnpicklingError(f"{shown(items)} as the items of a set")
    pickle_machine.check_keys(items)
    return set(items)


def strided(values: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """The view of a storage (flat `values`) that a pickled tensor describes, with offset and stride in elements.

    Raises ValueError, RuntimeError or TypeError for a view that is not within the storage, or of more than 64
    dimensions.
    """
    tensor = values.as_strided(sizes(size), sizes(stride), offset)
    if tensor.numel() > values.numel():  # strides of zero could describe gigabytes
        raise ValueError("a tensor is larger than its storage")
    return tensor


def is_count(value: object) -> TypeGuard[int]:
    """Whether it is an integer of 0 or above, of at most 63 bits."""
    return type(value) is int and 0 <= value < 1 << 63


MOST_DIMENSIONS = 64
"""Of a tensor, in PyTorch and elsewhere."""


def sizes(values: Any) -> tuple[int, ...]:
    """A shape or an offset per dimension, as a tuple. Raises ValueError for anything but at most 64 integers of 0 or
    above."""
    plain = type(values) in (tuple, list) and len(values) <= MOST_DIMENSIONS
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
