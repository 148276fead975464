"""The records of a file, of a directory of files, or of what `datasets` reads. A file that no format recognises is
text."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from precisionctl.discover import discover
from precisionctl.errors import DataError, nearest_path
from precisionctl.paths import StrPath
from precisionctl.trainer.data import formats
from precisionctl.trainer.data.formats.base import Format, a_document, begins_with, open_text
from precisionctl.trainer.data.hf_datasets import HUB, HfDataset
from precisionctl.trainer.data.megatron import prefix_of
from precisionctl.trainer.data.records import DataSource, Record
from precisionctl.trainer.data.shapes import text_under
from precisionctl.trainer.data.store import stats_of


def source_of(data: StrPath, cache: Path | None = None) -> DataSource:
    """What a path or a name of data means; `cache` is the folder of its tokens. Raises DataError for what is not there,
    and as `HfDataset.pinned`."""
    place, column = _with_column(data)
    source = _source_at(place, column, cache)
    if column is None:
        return source
    documents = source.records
    return replace(
        source,
        records=lambda: (text_under(record, column) for record in documents()),
        identity=[source.identity, column],
    )


def _with_column(data: StrPath) -> tuple[str, str | None]:
    """A path or name of data, and the column that is its text, if that follows after a `#`; but what is there under the
    whole name is a path."""
    place, _, column = os.fspath(data).rpartition("#")
    if place and column and not os.path.lexists(data):
        return place, column
    return os.fspath(data), None


def _source_at(place: str, column: str | None, cache: Path | None) -> DataSource:
    """What is at a place; of rows only the `column` need be read, if there is one."""
    named = HfDataset.read(place)
    if named and named.on_hub:
        pinned = named.pinned(cache)
        notes = (f"{named} is read at {pinned.revision}",) * (pinned != named)
        return DataSource(place, partial(pinned.records, column), str(pinned), notes=notes)
    path = Path(named.place if named else place)
    if not named and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise DataError("`datasets` wrote it, and reads it by split", where=path, do=f"Give {path}:train.")
    if not named and (prefix := prefix_of(path)):
        raise DataError("it is tokenized already", where=prefix, do="Give `resume`, `calibrate` or `eval` this name.")
    files = files_of(path)
    # The cards of a data set, as the Hub has them; where nothing else is there, or all is text, they are data
    many = not named and len(files) > 1
    cards = [file for file in files if file.name.lower() == "readme.md"] if many else []
    if cards and not any(_format_of(file) for file in files):
        cards = []
    files = [file for file in files if file not in cards]
    stats = stats_of(files)
    nbytes = 0 if any(file.suffix == ".gz" for file in files) else sum(stat.size for stat in stats)
    if named:
        return DataSource(place, partial(named.pinned(cache).records, column), [str(named), stats], nbytes)
    notes = tuple(f"{file} describes the data beside it, and is no document" for file in cards)
    return DataSource(place, partial(records, files, column), stats, nbytes, notes)


def check_named(data: StrPath) -> None:
    """Raise DataError for a path that is not there, also in the name of a split; of the Hub nothing is asked."""
    place, _ = _with_column(data)
    named = HfDataset.read(place)
    if not (named and named.on_hub):
        _check_exists(Path(named.place if named else place))


def _check_exists(path: Path) -> None:
    if not path.exists():
        is_name = len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists()
        on_hub = f"A data set on the Hub is given as {HUB}{path}." if is_name else ""
        raise DataError("no such file or directory", where=path, do=nearest_path(path) or on_hub)
    if not (path.is_file() or path.is_dir()):  # data is read more than once
        raise DataError("neither a file nor a folder", where=path, do="Write what a pipe gives into a file, first.")


def files_of(path: Path) -> list[Path]:
    """The file, or all visible files below a directory in the order of their paths. Raises DataError for a path that is
    not there, and for a directory without files, or with a Megatron data set."""
    _check_exists(path)
    if not path.is_dir():
        return [path]
    inside = (file for file in path.rglob("*") if file.is_file())
    found = sorted(file for file in inside if not any(p.startswith(".") for p in file.relative_to(path).parts))
    indexed = [file for file in found if file.suffix == ".idx" and file.with_suffix(".bin") in found]
    if indexed:
        raise DataError(
            f"{indexed[0].name} is Megatron's data, which is not read as part of a folder",
            where=path,
            do="Give the path without .idx; several are a blend, data.blend in a recipe.",
        )
    if not found:
        raise DataError(
            "the folder has no files", where=path, do="Give text, JSONL, JSON or parquet, or a folder of them."
        )
    return found


def _format_of(file: Path) -> Format | None:
    """The format of a file of rows; None for text. Raises DataError for a file that cannot be read."""
    try:
        return next((each for each in discover(formats, "FORMAT", Format) if each.recognises(file)), None)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=file) from None


def records(files: list[Path], column: str | None = None) -> Iterator[Record]:
    """All records of these files, lazily; of rows only a `column`, if one is wanted. Raises DataError for a file that
    cannot be read or is not in its format."""
    for file in files:
        known = _format_of(file)
        try:
            yield from (known.records if known else text_records)(file, column)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", where=file) from None


def text_records(path: Path, column: str | None) -> Iterator[Record]:
    """A UTF-8 file as one document. Raises DataError for one that is not UTF-8, for a table, and where a key of rows is
    wanted."""
    unpacked = path.with_suffix("") if path.suffix == ".gz" else path
    if unpacked.suffix.lower() in _TABLES:
        do = f"`datasets` reads it from its folder, as {path.parent}:SPLIT; or write it as parquet or JSON lines."
        raise DataError("a table, which is no text", where=path, do=do)
    if column not in (None, "text"):  # `text` is what a document has among rows, in a folder of both
        do = f"Leave `#{column}` out, and all of it is the text; rows come as JSON lines (.jsonl), JSON or parquet."
        raise DataError(f"it is a text file, which has no keys, and so no `{column}`", where=path, do=do)
    try:
        with open_text(path) as file:
            yield Record(str(path), {"text": a_document(file.read, path)})
    except UnicodeDecodeError as error:
        begin = begins_with(path, 8)
        packed = next((name for name, magic in _NOT_UNPACKED.items() if begin.startswith(magic)), "")
        do = f"It is packed by {packed}: unpack it first." if packed else "Text is any UTF-8 file; rows are .jsonl."
        raise DataError(f"not UTF-8 text: {error}", where=path, do=do) from None


_TABLES = (".csv", ".tsv", ".arrow")

_NOT_UNPACKED = {"zstandard": b"\x28\xb5\x2f\xfd", "bzip2": b"BZh", "xz": b"\xfd7zXZ\x00", "zip": b"PK\x03\x04"}
"""The bytes that packed files begin with."""
