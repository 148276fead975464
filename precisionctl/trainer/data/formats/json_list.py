"""A `.json` file that is one list of objects, as alpaca and sharegpt data often come. Any other `.json` is text."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from precisionctl.errors import DataError
from precisionctl.trainer.data.formats.base import Format, a_row, begins_with, check_document
from precisionctl.trainer.data.records import Record

_PIECE = 1 << 20
_SPACE = re.compile(r"\s*")


def _recognises(path: Path) -> bool:
    return path.suffix == ".json" and re.match(rb"(\xef\xbb\xbf)?\s*\[\s*\{", begins_with(path, 4096)) is not None


def _records(path: Path, _column: str | None) -> Iterator[Record]:
    """The objects of the list, one by one, as it may not fit into memory."""
    number, text = 0, _Text(path)
    try:
        text.skip("[")
        while True:
            number += 1
            where = f"{path}, entry {number}"
            yield a_row(text.value(where), where)
            if text.skip(",]") == "]":
                break
        text.skip("")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text: {error}", where=path) from None
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)  # its place is one in what was read
        raise DataError(f"not JSON: {why}", where=f"{path}, entry {number}") from None


class _Text:
    """A file's text that is read and parsed step by step."""

    def __init__(self, path: Path) -> None:
        self._pieces = _pieces(path)
        self._left = ""

    def skip(self, expected: str) -> str:
        """Skip white space and one of the `expected` characters, and return it; if `expected` is empty, the file must
        end there."""
        while not (left := self._left.lstrip()) and self._more():
            self._left = self._left.lstrip()
        if (left[:1] not in expected) if left else expected:
            raise json.JSONDecodeError(f"expected one of {expected!r}" if expected else "text after the list", left, 0)
        self._left = left[1:]
        return left[:1]

    def value(self, where: str) -> object:
        """The next JSON value. Raises DataError if it does not end within a document's most characters."""
        while True:
            start = _SPACE.match(self._left)
            try:
                value, end = json.JSONDecoder().raw_decode(self._left, start.end() if start else 0)
            except json.JSONDecodeError:
                check_document(self._left, where)
                if not self._more(at_least=len(self._left)):
                    raise
                continue
            self._left = self._left[end:]
            return value

    def _more(self, at_least: int = 0) -> bool:
        """Read more text, at least `at_least` characters: as much again for a long value, so that parsing it again from
        its start takes linear time in all."""
        added: list[str] = []
        while sum(len(piece) for piece in added) <= at_least and (piece := next(self._pieces, "")):
            added.append(piece)
        self._left += "".join(added)
        return bool(added)


def _pieces(path: Path) -> Iterator[str]:
    with open(path, encoding="utf-8-sig") as file:
        while piece := file.read(_PIECE):
            yield piece


FORMAT = Format(_recognises, _records)
