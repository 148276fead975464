"""Parquet, as the Hugging Face hub keeps its data sets; read with pyarrow, a batch of rows at a time."""

from collections.abc import Iterator
from pathlib import Path

from precisionctl.errors import DataError, EnvironmentProblem
from precisionctl.trainer.data.formats.base import Format, a_table_row, begins_with
from precisionctl.trainer.data.records import Record
from precisionctl.trainer.data.shapes import columns_to_read

_ROWS_AT_ONCE = 256


def _recognises(path: Path) -> bool:
    return path.suffix == ".parquet" or begins_with(path, 4) == b"PAR1"


def _records(path: Path, column: str | None) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise EnvironmentProblem(
            "reading parquet needs pyarrow", where=path, do='Install it: pip install "precisionctl[parquet]".'
        ) from None
    try:
        with ParquetFile(path) as file:
            columns = columns_to_read(file.schema_arrow.names, column)
            number = 0
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield a_table_row(row, f"{path}, row {number}")
    except (ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # the system's; pyarrow's own OSErrors have no errno
        raise DataError(f"not a valid parquet file: {error}", where=path) from None


FORMAT = Format(_recognises, _records)
