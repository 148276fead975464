"""A UTF-8 file of any kind is one document."""

from collections.abc import Iterator
from pathlib import Path

from precisionctl.errors import DataError
from precisionctl.trainer.data.formats.base import Record


def records(path: Path) -> Iterator[Record]:
    """The one document. Raises DataError for a file that is not UTF-8."""
    try:
        yield Record(str(path), {"text": path.read_text(encoding="utf-8-sig")})
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text: {error}", where=path, do="Text is any UTF-8 file; rows are .jsonl.") from None
