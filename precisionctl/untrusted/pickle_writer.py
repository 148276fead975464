"""Write pickles opcode by opcode: for classes that are not installed or imported here, and with reproducible bytes.

`pickle.dumps` imports a class before it writes its name, and writes a memo that depends on which objects are shared.
Here the bytes depend on the value alone: in the memo are classes and the names of fields, which make up most of an
index otherwise.
"""

import functools
import io
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any, NamedTuple


class Global(NamedTuple):
    """A class or function by name."""

    module: str
    name: str


class PickledObject(NamedTuple):
    """An object as pickle makes it: `make(*arguments)`, or `make.__new__(make, *arguments)` when `new`; then
    `items` are set in it, and `fields` become its `__dict__`, or go to its `__setstate__`."""

    make: Global
    arguments: tuple[object, ...]
    new: bool = False
    fields: Mapping[str, object] | tuple[object, ...] | None = None
    items: Mapping[object, object] | None = None


class PersistentId(NamedTuple):
    """An identifier that the unpickler's `persistent_load` turns into an object."""

    identifier: tuple[object, ...]


class LazyList:
    """A list whose items are generated while they are written, as all of them at once would take too much memory."""

    def __init__(self, items: Iterable[object]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[object]:
        return iter(self._items)


class LazyDict:
    """A dict whose items are generated while they are written."""

    def __init__(self, items: Iterable[tuple[object, object]]) -> None:
        self._items = items

    def items(self) -> Iterator[tuple[object, object]]:
        return iter(self._items)


def dumps(value: object, protocol: int = 4) -> bytes:
    """A pickle of None, bool, int, float, str, bytes, tuples, lists, dicts and the objects above. Raises TypeError for
    a value of any other type."""
    file = io.BytesIO()
    dump(value, file, protocol)
    return file.getvalue()


def dump(value: object, file: IO[bytes], protocol: int = 4) -> None:
    """Write the bytes of `dumps` to a file, a megabyte at a time."""
    pickled = _Pickled(file)
    pickled += pickle.PROTO + bytes([protocol])
    _add(value, pickled)
    pickled += pickle.STOP
    file.write(pickled)


class _Pickled(bytearray):
    """A buffer of opcodes that are written to a file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._memo: dict[Global | str, bytes] = {}

    def add_name(self, name: Global | str) -> None:
        """Append a class, or the name of a field: in full the first time, then what gets it from the memo."""
        if name in self._memo:
            self += self._memo[name]
            return
        number = len(self._memo)
        short = number < 256
        index = bytes([number]) if short else struct.pack("<I", number)
        self._memo[name] = (pickle.BINGET if short else pickle.LONG_BINGET) + index
        self += _named(name) if isinstance(name, Global) else _text(name)
        self += (pickle.BINPUT if short else pickle.LONG_BINPUT) + index

    def flush_if_full(self) -> None:
        """Write and empty the buffer when it holds a megabyte."""
        if len(self) >= 1 << 20:
            self._file.write(self)
            self.clear()


def _add(value: Any, to: _Pickled) -> None:
    """Append the opcodes of a value."""
    # By type, as fast as a dict: the index of a large checkpoint has millions of values
    add = _ADD.get(type(value)) or next((_ADD[kind] for kind in type(value).__mro__ if kind in _ADD), None)
    if add is None:
        raise TypeError(f"{type(value).__name__} has no opcodes here")
    add(value, to)


def _int(value: int, to: _Pickled) -> None:
    if 0 <= value < 256:
        to += pickle.BININT1 + bytes([value])
        return
    if -(1 << 31) <= value < 1 << 31:
        to += pickle.BININT + struct.pack("<i", value)
        return
    number = pickle.encode_long(value)
    to += pickle.LONG1 + bytes([len(number)]) if len(number) < 256 else pickle.LONG4 + _length(number)
    to += number


def _text(value: str) -> bytes:
    text = value.encode(errors="surrogatepass")  # as pickle itself does
    return pickle.BINUNICODE + _length(text) + text


@functools.cache
def _named(value: Global) -> bytes:
    return pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()


def _object(value: PickledObject, to: _Pickled) -> None:
    to.add_name(value.make)
    _tuple(value.arguments, to)
    to += pickle.NEWOBJ if value.new else pickle.REDUCE
    if value.items:
        _set_items(value.items, to)
    if value.fields is None:
        return
    if isinstance(value.fields, tuple):
        _tuple(value.fields, to)
    else:
        to += pickle.EMPTY_DICT + pickle.MARK
        for name, item in value.fields.items():
            to.add_name(name)
            _add(item, to)
        to += pickle.SETITEMS
    to += pickle.BUILD


def _persistent(value: PersistentId, to: _Pickled) -> None:
    _tuple(value.identifier, to)
    to += pickle.BINPERSID


def _tuple(value: tuple[object, ...], to: _Pickled) -> None:
    short = len(value) < len(_TUPLES)
    if not short:
        to += pickle.MARK
    for item in value:
        _add(item, to)
    to += _TUPLES[len(value)] if short else pickle.TUPLE


_TUPLES = (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
"""The opcodes for tuples of so many items, which need no mark below these."""


def _list(value: list[object] | LazyList, to: _Pickled) -> None:
    to += pickle.EMPTY_LIST + pickle.MARK
    for item in value:
        _add(item, to)
        to.flush_if_full()
    to += pickle.APPENDS


def _dict(value: Mapping[object, object] | LazyDict, to: _Pickled) -> None:
    to += pickle.EMPTY_DICT
    _set_items(value, to)


def _set_items(value: Mapping[object, object] | LazyDict, to: _Pickled) -> None:
    to += pickle.MARK
    for key, item in value.items():
        _add(key, to)
        _add(item, to)
        to.flush_if_full()
    to += pickle.SETITEMS


_ADD: Mapping[type, Callable[[Any, _Pickled], None]] = {
    type(None): lambda value, to: to.extend(pickle.NONE),
    bool: lambda value, to: to.extend(pickle.NEWTRUE if value else pickle.NEWFALSE),
    int: _int,
    float: lambda value, to: to.extend(pickle.BINFLOAT + struct.pack(">d", value)),
    str: lambda value, to: to.extend(_text(value)),
    bytes: lambda value, to: to.extend(pickle.BINBYTES + _length(value) + value),
    Global: lambda value, to: to.add_name(value),
    PickledObject: _object,
    PersistentId: _persistent,
    tuple: _tuple,
    list: _list,
    LazyList: _list,
    dict: _dict,
    LazyDict: _dict,
}


def _length(data: bytes) -> bytes:
    return struct.pack("<I", len(data))
