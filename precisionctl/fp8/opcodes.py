"""Pickles assembled opcode by opcode: of classes that are not installed here, and always the same bytes.

`pickle.dumps` looks classes up before it names them and writes a memo that depends on which objects are
shared. Here a pickle is a function of its value alone: no memo, no frames.
"""

import pickle
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Global(NamedTuple):
    """A class or function by name."""

    module: str
    name: str


class Made(NamedTuple):
    """An object as pickle makes it: `make(*arguments)`, or `make.__new__(make, *arguments)` when `new`; then
    `fields` become its `__dict__`, or go to its `__setstate__`."""

    make: Global
    arguments: tuple[object, ...]
    new: bool = False
    fields: Mapping[str, object] | tuple[object, ...] | None = None


class Persistent(NamedTuple):
    """An identifier that the unpickler's `persistent_load` turns into an object."""

    identifier: tuple[object, ...]


def dumps(value: object, protocol: int = 4) -> bytes:
    """A pickle of None, bool, int, float, str, bytes, tuples, lists, dicts and the objects above."""
    return pickle.PROTO + bytes([protocol]) + _opcodes(value) + pickle.STOP


def _opcodes(value: object) -> bytes:
    match value:
        case None:
            return pickle.NONE
        case bool():
            return pickle.NEWTRUE if value else pickle.NEWFALSE
        case int() if -(1 << 31) <= value < 1 << 31:
            return pickle.BININT + struct.pack("<i", value)
        case int():
            number = pickle.encode_long(value)
            long = pickle.LONG1 + bytes([len(number)]) if len(number) < 256 else pickle.LONG4 + _length(number)
            return long + number
        case float():
            return pickle.BINFLOAT + struct.pack(">d", value)
        case str():
            text = value.encode(errors="surrogatepass")  # as pickle itself does
            return pickle.BINUNICODE + _length(text) + text
        case bytes():
            return pickle.BINBYTES + _length(value) + value
        case Global(module, name):
            return pickle.GLOBAL + f"{module}\n{name}\n".encode()
        case Made(make, arguments, new, fields):
            made = _sequence((make, arguments)) + (pickle.NEWOBJ if new else pickle.REDUCE)
            return made if fields is None else made + _opcodes(fields) + pickle.BUILD
        case Persistent(identifier):
            return _opcodes(identifier) + pickle.BINPERSID
        case tuple():
            return pickle.MARK + _sequence(value) + pickle.TUPLE
        case list():
            return pickle.EMPTY_LIST + pickle.MARK + _sequence(value) + pickle.APPENDS
        case dict():
            items = b"".join(_sequence(item) for item in value.items())
            return pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS
    raise TypeError(f"{type(value).__name__} has no opcodes here")


def _length(data: bytes) -> bytes:
    return struct.pack("<I", len(data))


def _sequence(values: Iterable[object]) -> bytes:
    return b"".join(_opcodes(value) for value in values)
