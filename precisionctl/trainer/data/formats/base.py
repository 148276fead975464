"""Format: recognises files of one kind and reads their records one by one."""

import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from precisionctl.errors import DataError
from precisionctl.trainer.data.records import Record

MOST_CHARACTERS = 1 << 30
"""Of a document: a tokenizer takes 600 bytes for each of its tokens, and a megabyte of gzip can be a gigabyte of it."""


@dataclass(frozen=True)
class Format:
    """A file format. `records` reads lazily, and raises DataError, with the place, for a file that is not in the
    format; OSError passes through. Its second argument is the one column that is wanted, or None for those that
    `shapes` knows. A columnar format need not read the others."""

    recognises: Callable[[Path], bool]
    records: Callable[[Path, str | None], Iterator[Record]]


def a_row(value: object, where: str) -> Record:
    """A record of a parsed value. Raises DataError if it is not a JSON object."""
    if not isinstance(value, dict):
        raise DataError(f"a row must be a JSON object, not {str(value)[:60]!r}", where=where)
    return Record(where, value)


def a_table_row(columns: Mapping[str, Any], where: str) -> Record:
    """A record of a table's row, whose values have no keys that are None: in a column of messages every message has the
    keys of all. A column that is None stays, for the error that says so."""
    return Record(where, {name: _without_nulls(value) for name, value in columns.items()})


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def begins_with(path: Path, size: int) -> bytes:
    """The first `size` bytes of a file, or all."""
    with open(path, "rb") as file:
        return file.read(size)


@contextmanager
def open_text(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """A UTF-8 file to read; one that gzip packed is unpacked piece by piece. Raises DataError for a damaged one."""
    opened = gzip.open if begins_with(path, 2) == b"\x1f\x8b" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline=newline) as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"not a whole gzip file: {error}", where=path, do="Is the copy whole?") from None


def a_document(read: Callable[[int], str], where: object) -> str:
    """What `read` returns of at most so many characters. Raises as `check_document`."""
    check_document(text := read(MOST_CHARACTERS + 1), where)
    return text


def check_document(text: str, where: object) -> None:
    """Raise DataError if a document has more than MOST_CHARACTERS."""
    if len(text) > MOST_CHARACTERS:
        raise DataError(
            f"a document of more than {MOST_CHARACTERS:,} characters", where=where, do="Divide it into several."
        )
