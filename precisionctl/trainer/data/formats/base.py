"""What a kind of file is: something that recognises its files and gives their records one by one."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from precisionctl.errors import DataError


class Record(NamedTuple):
    """One row of a file by its keys, and where it is, for errors: `chats.jsonl, line 7`."""

    where: str
    row: Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """A kind of file. `records` reads on as it is asked to, and raises DataError, with the place, for what is
    no such file; OSError passes through."""

    recognises: Callable[[Path], bool]
    records: Callable[[Path], Iterator[Record]]


def a_row(value: object, where: str) -> Record:
    """A record of what a file holds. Raises DataError where that is no JSON object."""
    if not isinstance(value, dict):
        raise DataError(f"a row must be a JSON object, not {str(value)[:60]!r}", where=where)
    return Record(where, value)


def begins_with(path: Path, size: int) -> bytes:
    """The first `size` bytes of a file, or all."""
    with open(path, "rb") as file:
        return file.read(size)
