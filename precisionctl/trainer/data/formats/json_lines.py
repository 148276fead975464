"""JSON lines (`.jsonl`, `.ndjson`, each also with `.gz`): a JSON object on each line. So is `.json.gz`, as C4 and Dolma
come, unless it is a list, and a `.json` whose first two lines are an object each, as it is unpacked of these."""

import json
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from precisionctl.errors import DataError
from precisionctl.trainer.data.formats.base import (
    MOST_CHARACTERS,
    Format,
    a_document,
    a_row,
    begins_with,
    open_text,
)
from precisionctl.trainer.data.records import Record


def _records(path: Path, _column: str | None) -> Iterator[Record]:
    with open_text(path, newline="\n") as file:  # JSON strings may hold other ends of lines
        number = 0
        try:
            while line := a_document(file.readline, f"{path}, line {number + 1}"):
                number += 1
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    do = "Each line is a JSON object of its own."
                    why = str(error)
                    if isinstance(error, json.JSONDecodeError):  # whose own "line 1" is one within the line
                        why = f"{error.msg}, in column {error.colno}"
                    raise DataError(f"not JSON: {why}", where=where, do=do) from None
                yield a_row(value, where)
        except UnicodeDecodeError as error:
            raise DataError(f"not UTF-8 text: {error}", where=f"{path}, after line {number}") from None


def is_json_lines(path: Path) -> bool:
    """Whether a file is named as JSON lines, or is a `.json` that begins with two of them."""
    name = path.name.lower()
    if name.removesuffix(".gz").endswith((".jsonl", ".ndjson")):
        return True
    if name.endswith(".json.gz"):
        begin = begins_with(path, 1 << 12)
        with suppress(zlib.error):  # of a damaged file, or one that gzip has not packed
            begin = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(begin, 64)
        return not begin.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    # A list on one line may not fit into memory: the line is only read of what begins with an object
    if not name.endswith(".json") or not begins_with(path, 4).lstrip(b"\xef\xbb\xbf").startswith(b"{"):
        return False
    with open(path, "rb") as file:
        return file.readline(MOST_CHARACTERS).rstrip().endswith(b"}") and file.read(1) == b"{"


FORMAT = Format(is_json_lines, _records)
