"""The protocol between a tokenizer's process and its client: packets of a small JSON object followed by bytes."""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

IDS = np.dtype("<u4")
"""The dtype of token ids, as in the tokenizers library; a model may not have all of them."""

_LENGTH = struct.Struct("<Q")
_MAX_FIELDS = 1 << 20
"""The JSON object may have so many bytes more than the parts (`receive`)."""


class Pipe(Protocol):
    """The ends of two pipes. `read` returns fewer bytes than asked for only at the end."""

    def read(self, size: int, /) -> bytes: ...

    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> object: ...


class Packet(NamedTuple):
    """What is sent at once: a JSON object, and any number of byte strings."""

    fields: Mapping[str, Any]
    parts: Sequence[bytes]


def send(pipe: Pipe, fields: Mapping[str, Any], parts: Sequence[bytes] = ()) -> None:
    """Send a packet."""
    text = json.dumps({**fields, "sizes": [len(part) for part in parts]}).encode()
    pipe.write(_LENGTH.pack(len(text)) + text)
    for part in parts:
        pipe.write(part)
    pipe.flush()


def receive(pipe: Pipe, most: int) -> Packet:
    """Receive a packet. Raises EOFError if the pipe ends, ValueError for parts of more than `most` bytes, and for a
    JSON object of more than `most` and _MAX_FIELDS."""
    (length,) = _LENGTH.unpack(_exactly(pipe, _LENGTH.size))
    if length > _MAX_FIELDS + most:
        raise ValueError(f"{length} bytes of JSON")
    fields = json.loads(_exactly(pipe, length))
    sizes = fields.pop("sizes")
    if sum(sizes) > most:
        raise ValueError(f"{sum(sizes)} bytes")
    return Packet(fields, [_exactly(pipe, size) for size in sizes])


def _exactly(pipe: Pipe, size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data
