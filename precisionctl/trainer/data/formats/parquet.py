"""Parquet, as the Hugging Face hub keeps its data sets; read with pyarrow, a batch of rows at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from precisionctl.errors import DataError, EnvironmentProblem
from precisionctl.trainer.data.formats.base import Format, Record, begins_with
from precisionctl.trainer.data.shapes import KEYS

_ROWS_AT_ONCE = 256


def _recognises(path: Path) -> bool:
    return path.suffix == ".parquet" or begins_with(path, 4) == b"PAR1"


def _records(path: Path) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise EnvironmentProblem(
            "reading parquet needs pyarrow", where=path, do='Install it: pip install "precisionctl[parquet]".'
        ) from None
    try:
        with ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in KEYS]
            number = 0
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns or None):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(f"{path}, row {number}", _present(row))
    except (ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # the system's; pyarrow's own OSErrors have no errno
        raise DataError(f"not a valid parquet file: {error}", where=path) from None


def _present(value: Any) -> Any:
    """A value without keys that are None: in a column of messages every message has the keys of all."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list) else value


FORMAT = Format(_recognises, _records)
