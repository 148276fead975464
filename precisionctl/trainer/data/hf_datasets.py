"""Data sets that Hugging Face `datasets` reads: those of the Hub, and splits of a directory.

Their rows are streamed into the tokenizer, and none is stored: what a run reads, at any position, are the tokens.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.hf_directory.hub import unreachable
from precisionctl.errors import DataError, EnvironmentProblem, PrecisionctlError, require_package
from precisionctl.trainer.data.formats.base import a_table_row
from precisionctl.trainer.data.records import Record
from precisionctl.trainer.data.shapes import columns_to_read
from precisionctl.trainer.data.store import known_commit
from precisionctl.untrusted.safe_files import leads_out

HUB = "hf://datasets/"

_PART = r"(?::(?:(?P<config>[^:/]+):)?(?P<split>[^:/]+))"
_OF_HUB = re.compile(rf"(?P<place>{HUB}[\w.-]+/[\w.-]+)(?:@(?P<revision>[^:@]+))?{_PART}?")
_OF_DIRECTORY = re.compile(rf"(?P<place>[^:]+){_PART}")
_COMMIT = re.compile("[0-9a-f]{40}")

_BUILDERS = ("arrow", "csv", "json", "parquet", "text")
"""The library's readers of rows. Others decode pictures, sounds and archives, by many more packages."""


@dataclass(frozen=True)
class HfDataset:
    """A split of a data set: `hf://datasets/ORG/NAME[@REVISION][:[CONFIG:]SPLIT]` on the Hub, where the default is
    train, or `DIRECTORY:[CONFIG:]SPLIT`."""

    place: str
    revision: str | None
    config: str | None
    split: str

    @staticmethod
    def read(text: str) -> "HfDataset | None":
        """The data set that a text names, None if it is a path. Raises DataError for what only begins like a name."""
        if text.startswith(HUB):
            if found := _OF_HUB.fullmatch(text):
                return HfDataset(found["place"], found["revision"], found["config"], found["split"] or "train")
            raise DataError(
                "not the name of a data set",
                where=text,
                do=f"Write {HUB}ORG/NAME[@REVISION][:[CONFIG:]SPLIT], or DIRECTORY:[CONFIG:]SPLIT for what is here.",
            )
        found = _OF_DIRECTORY.fullmatch(text)
        if found and not os.path.lexists(text) and os.path.isdir(found["place"]):
            return HfDataset(found["place"], None, found["config"], found["split"])
        return None

    def __str__(self) -> str:
        part = self.split if self.config is None else f"{self.config}:{self.split}"
        return f"{self.place}@{self.revision}:{part}" if self.revision else f"{self.place}:{part}"

    @property
    def on_hub(self) -> bool:
        return self.place.startswith(HUB)

    def pinned(self, cache: Path | None) -> "HfDataset":
        """The same data set at a fixed commit, if it is on the Hub. The Hub is asked once for the commit of a branch, a
        tag, or a name without either, and the answer is kept in the folder of tokens, so that all ranks, and a run that
        continues, have the same rows.

        Raises EnvironmentProblem without the library or the Hub, DataError for a data set that is not there.
        """
        require_package("datasets", "datasets", f"reading {self}")
        if not self.on_hub or (self.revision and _COMMIT.fullmatch(self.revision)):
            return self
        name = f"{self.place}@{self.revision or 'main'}"
        return replace(self, revision=known_commit(cache, name, self._commit))

    def _commit(self) -> str:
        with self._our_errors():
            found = self._builder().hash
        if not (isinstance(found, str) and _COMMIT.fullmatch(found)):  # it decides which cached tokens are used
            raise EnvironmentProblem("the Hub does not say which commit it is", where=self, do="Is it online?")
        return found

    def records(self, column: str | None) -> Iterator[Record]:
        """All rows, in the order that the library has; of a `column` alone if one is wanted. Raises as `pinned`, and
        DataError for files that hold no rows, and for files outside the directory that its card or links name."""
        with self._our_errors():
            builder = self._builder()
            if builder.name not in _BUILDERS:
                do = f"Formats that are read: {', '.join(_BUILDERS)}."
                raise DataError(f"its files are `{builder.name}`, which are no rows of text", where=self, do=do)
            named = () if self.on_hub else builder.config.data_files.values()  # the library checks the Hub's
            for file in chain.from_iterable(named):
                # an address, also `zip://member::archive`, is no path: it would seem to be one in the current directory
                if "::" in file or "://" in file or leads_out(Path(file), Path(self.place)):
                    do = "Give a directory that has its files in it."
                    raise DataError(f"its card or a link names a file from elsewhere: {file}", where=self, do=do)
            rows = builder.as_streaming_dataset(split=self.split)
            if rows.column_names:
                rows = rows.select_columns(columns_to_read(rows.column_names, column))
            each = iter(rows)
        number = 0
        while True:
            with self._our_errors():
                row = next(each, None)
            if row is None:
                return
            number += 1
            yield a_table_row(row, f"{self}, row {number}")

    def _builder(self) -> Any:
        from datasets import load_dataset_builder

        place = self.place if self.on_hub else os.path.abspath(self.place)  # of `.` the library knows no name
        return load_dataset_builder(place, self.config, revision=self.revision)

    @contextmanager
    def _our_errors(self) -> Iterator[None]:
        try:
            yield
        except PrecisionctlError:
            raise
        except Exception as error:  # the library raises anything, also what pyarrow, pandas and the Hub's client do
            what = str(error) or type(error).__name__
            if not unreachable(error):
                raise DataError(f"`datasets` cannot read it: {what}", where=self) from error
            repo = self.place.removeprefix(HUB)
            do = f"Try again, or give a copy, as DIR:SPLIT: `hf download --repo-type dataset {repo} --local-dir DIR`."
            raise EnvironmentProblem(f"the Hub cannot be reached: {what}", where=self, do=do) from error
