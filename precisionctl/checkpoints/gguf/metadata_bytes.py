"""The metadata of a GGUF file, as bytes.

A value has the type that its Python object has: NumPy's scalars and arrays are numbers of their dtype (llama.cpp looks
for each key under one type), `bool`, `str`, and lists of strings.

Source: ggml/include/gguf.h and docs/gguf.md of ggml.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from precisionctl.checkpoints.gguf.head import ARRAY, BOOL, NUMBERS, STRING, TYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

GgufValue: TypeAlias = "np.generic | bool | str | list[str] | NDArray[Any]"
Metadata: TypeAlias = Mapping[str, GgufValue]

_TYPES = {np.dtype(f"<{letter}"): number for number, letter in NUMBERS.items()}


def metadata_bytes(metadata: Metadata) -> bytes:
    """All keys with their values, in their order."""
    return b"".join(string_bytes(key) + _value_bytes(value) for key, value in metadata.items())


def string_bytes(text: str) -> bytes:
    """A length and UTF-8. What is no text (half of a surrogate pair, from a stranger's JSON) becomes `?`."""
    data = text.encode(errors="replace")
    return struct.pack("<Q", len(data)) + data


def type_of(value: GgufValue) -> str:
    """The word for the type of a value, as the head of a file is read."""
    if isinstance(value, list):
        return f"list of {TYPES[STRING]}"
    if isinstance(value, bool | str):
        return TYPES[BOOL if isinstance(value, bool) else STRING]
    name = TYPES[_TYPES[value.dtype]]
    return f"list of {name}" if isinstance(value, np.ndarray) else name


def _value_bytes(value: GgufValue) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + string_bytes(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(string_bytes, value))
    number = _TYPES[value.dtype]
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", ARRAY, number, len(value)) + value.tobytes()
    return struct.pack("<I", number) + value.tobytes()
