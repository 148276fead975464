"""A `.json` file that is one list of objects, as alpaca and sharegpt data often come, or one object that is a row."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from precisionctl.errors import DataError
from precisionctl.trainer.data.formats.base import Format, a_row, check_document, open_text
from precisionctl.trainer.data.formats.json_lines import is_json_lines
from precisionctl.trainer.data.records import Record
from precisionctl.trainer.data.shapes import makes_samples

_PIECE = 1 << 20
_SPACE = re.compile(r"[ \t\n\r]*")  # JSON's own


def _recognises(path: Path) -> bool:
    return path.name.lower().removesuffix(".gz").endswith(".json") and not is_json_lines(path)


def _records(path: Path, column: str | None) -> Iterator[Record]:
    """The objects of the list, one by one, as it may not fit into memory; or the one object."""
    text, where = _Text(path), str(path)
    try:
        if text.next() != "[":
            # A row, as data sets of many small files have it; or the description of a data set beside its files
            record = a_row(text.value(where), where)
            if not makes_samples(record.row, column):
                raise DataError(
                    "a JSON file that is no row of data",
                    where=where,
                    do="Give the files of rows themselves, or a folder of nothing else; what `datasets` reads is "
                    "DIRECTORY:SPLIT.",
                )
            yield record
            text.skip("")
            return
        text.skip("[")
        number = 0
        while number or text.next() != "]":
            number += 1
            where = f"{path}, entry {number}"
            yield a_row(text.value(where), where)
            if text.skip(",]") == "]":
                break
        else:
            text.skip("]")
        text.skip("")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text: {error}", where=path) from None
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)  # its place is one in what was read
        raise DataError(f"not JSON: {why}", where=where, do="A row on each line is .jsonl.") from None


class _Text:
    """A file's text that is read and parsed step by step: what is read, of which `_at` characters are parsed."""

    def __init__(self, path: Path) -> None:
        self._pieces = _pieces(path)
        self._read, self._at = "", 0

    def next(self) -> str:
        """The next character that is no white space; empty at the end of the file."""
        while True:
            space = _SPACE.match(self._read, self._at)
            assert space is not None, "it matches nothing, too"
            self._at = space.end()
            if self._at < len(self._read) or not self._more():
                return self._read[self._at : self._at + 1]

    def skip(self, expected: str) -> str:
        """Skip white space and one of the `expected` characters, and return it; if `expected` is empty, the file must
        end there."""
        found = self.next()
        if (found not in expected) if found else expected:
            raise json.JSONDecodeError(f"expected one of {expected!r}" if expected else "text after its end", found, 0)
        self._at += len(found)
        return found

    def value(self, where: str) -> object:
        """The next JSON value. Raises DataError if it does not end within a document's most characters."""
        self.next()
        whole = False
        while True:
            try:
                value, self._at = _DECODER.raw_decode(self._read, self._at)
                return value
            except json.JSONDecodeError:  # it has all that is read, which can be dropped once it is gone
                if whole:
                    raise
            check_document(self._read[self._at :], where)
            whole = not self._more(at_least=len(self._read) - self._at)

    def _more(self, at_least: int = 0) -> bool:
        """Read more text, at least `at_least` characters: as much again for a long value, so that parsing it again from
        its start takes linear time in all. What is parsed is dropped."""
        self._read, self._at = self._read[self._at :], 0
        added: list[str] = []
        while sum(len(piece) for piece in added) <= at_least and (piece := next(self._pieces, "")):
            added.append(piece)
        self._read += "".join(added)
        return bool(added)


_DECODER = json.JSONDecoder()


def _pieces(path: Path) -> Iterator[str]:
    with open_text(path) as file:
        while piece := file.read(_PIECE):
            yield piece


FORMAT = Format(_recognises, _records)
