"""Parse JSON from strangers: an object, of so many values and so deep that memory and recursion can bear it; and read
the objects in it."""

import json
from collections.abc import Mapping
from typing import Any

from precisionctl.errors import DamagedCheckpoint

_MOST_PARTS, _DEEPEST = 8_000_000, 100
"""Limits for JSON: more values than an index of the largest model has, yet at most a gigabyte of memory as lists."""


def parse_json(data: bytes, where: object) -> dict[str, Any]:
    """Parse a JSON object from a stranger. Raises DamagedCheckpoint for anything else, for too many or too deeply
    nested values, and for a key with two values."""
    if sum(map(data.count, (b",", b"[", b"{"))) > _MOST_PARTS:
        raise DamagedCheckpoint(f"JSON of more than {_MOST_PARTS:,} parts", where=where, do="Is the copy whole?")
    try:
        parsed = json.loads(data, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"not readable as JSON: {error}", where=where) from error
    if not isinstance(parsed, dict):
        raise DamagedCheckpoint("not a JSON object", where=where)
    level: list[Any] = [parsed]
    for _ in range(_DEEPEST):  # or recursion over the values would fail
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [part for parts in inside for part in parts if isinstance(part, dict | list)]
        if not level:
            return parsed
    raise DamagedCheckpoint(f"not readable as JSON: values that are nested more than {_DEEPEST} deep", where=where)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"`{key:.80}` is there twice")
        found[key] = value
    return found


def mapping_or_empty(value: object) -> Mapping[str, Any]:
    """A value of a config where an object is expected; empty for any other."""
    return value if isinstance(value, Mapping) else {}
