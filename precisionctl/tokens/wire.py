"""What a tokenizer's process and whoever asks it say to one another: a few words of JSON, and bytes behind them."""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

IDS = np.dtype("<u4")
"""Token ids, as the tokenizers library has them: not each is one that a model has."""

_LENGTH = struct.Struct("<Q")
_WORDS = 1 << 20
"""Bytes that the words may have."""


class Ends(Protocol):
    """Two ends of pipes. `read` gives fewer bytes than it was asked for where no more come."""

    def read(self, size: int, /) -> bytes: ...

    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> object: ...


class Said(NamedTuple):
    words: Mapping[str, Any]
    parts: Sequence[bytes]


def send(pipe: Ends, words: Mapping[str, Any], parts: Sequence[bytes] = ()) -> None:
    """Say something."""
    said = json.dumps({**words, "sizes": [len(part) for part in parts]}).encode()
    pipe.write(_LENGTH.pack(len(said)) + said)
    for part in parts:
        pipe.write(part)
    pipe.flush()


def receive(pipe: Ends, most: int) -> Said:
    """What is said next. Raises EOFError where it breaks off, ValueError for parts of more than `most` bytes."""
    (length,) = _LENGTH.unpack(_exactly(pipe, _LENGTH.size))
    if length > _WORDS + most:
        raise ValueError(f"{length} bytes of words")
    words = json.loads(_exactly(pipe, length))
    sizes = words.pop("sizes")
    if sum(sizes) > most:
        raise ValueError(f"{sum(sizes)} bytes")
    return Said(words, [_exactly(pipe, size) for size in sizes])


def _exactly(pipe: Ends, size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data
