"""Pickles that ask for gigabytes or centuries, and the process in which they are read."""

import io
import json
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from programs import run_program

from precisionctl.untrusted.pickle_writer import dumps

GIGABYTE = 1 << 30
SHARED = pickle.EMPTY_TUPLE + b"".join(b"q%bh%b\x86" % (bytes([i]), bytes([i])) for i in range(60))
"""Opcodes of a tuple both parts of which are one tuple, and so on: 2**60 parts for who walks through it."""


def pickled(*opcodes: bytes) -> bytes:
    return pickle.PROTO + b"\x04" + b"".join(opcodes) + pickle.STOP


def called(module: str, name: str, *arguments: bytes) -> bytes:
    """Opcodes of `name(*arguments)`."""
    function = pickle.GLOBAL + f"{module}\n{name}\n".encode()
    return function + pickle.MARK + b"".join(arguments) + pickle.TUPLE + pickle.REDUCE


def constant(value: object) -> bytes:
    return dumps(value)[2:-1]


def list_of(item: bytes) -> bytes:
    return pickle.EMPTY_LIST + item + pickle.APPEND


MODULUS = (1 << 61) - 1
"""An integer's hash is its remainder by this number."""
ONE_HASH = [constant(number * MODULUS) for number in range(1, 60_000)]
PAIRS = list_of(SHARED + pickle.NONE + pickle.TUPLE2)
HASHES: Mapping[str, bytes] = {
    "a key": pickle.EMPTY_DICT + SHARED + pickle.NONE + pickle.SETITEM,
    "keys": pickle.EMPTY_DICT + pickle.MARK + SHARED + pickle.NONE + pickle.SETITEMS,
    "a part of a key": pickle.EMPTY_DICT + SHARED + pickle.TUPLE1 + pickle.NONE + pickle.SETITEM,
    "an item": pickle.EMPTY_SET + pickle.MARK + SHARED + pickle.ADDITEMS,
    "a frozen set": pickle.MARK + SHARED + pickle.FROZENSET,
    "keys of one hash": pickle.EMPTY_DICT + pickle.MARK + pickle.NONE.join(ONE_HASH) + pickle.NONE + pickle.SETITEMS,
    "tuples of one hash": pickle.EMPTY_DICT
    + pickle.MARK
    + (pickle.TUPLE1 + pickle.NONE).join(ONE_HASH)
    + (pickle.TUPLE1 + pickle.NONE + pickle.SETITEMS),
    "items of one hash": pickle.EMPTY_SET + pickle.MARK + b"".join(ONE_HASH) + pickle.ADDITEMS,
    "an ordered dict": called("collections", "OrderedDict", PAIRS),
    "a set": called("__builtin__", "set", list_of(SHARED)),
    "a bytearray": called("__builtin__", "bytearray", constant(GIGABYTE)),
    "a bytearray by its new name": called("builtins", "bytearray", constant(GIGABYTE)),
    "a state for what has none": SHARED + constant({"a": 1}) + pickle.BUILD,
}


def detonate(how: str, paths: Iterable[Path]) -> dict[str, str]:
    """What is said of each, by path."""
    with NamedTemporaryFile("r") as file:
        run_program(Path(__file__).with_name("detonate.py"), file.name, how, *paths)
        said: dict[str, str] = json.load(file)
    return said


def archived(content: bytes) -> bytes:
    """An archive of torch.save with another pickle in it."""
    saved, changed = io.BytesIO(), io.BytesIO()
    torch.save(torch.ones(3), saved)
    with zipfile.ZipFile(saved) as before, zipfile.ZipFile(changed, "w") as after:
        for name in before.namelist():
            after.writestr(name, content if name.endswith("/data.pkl") else before.read(name))
    return changed.getvalue()
