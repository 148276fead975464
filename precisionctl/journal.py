"""Journal: what is done and on the disk, so that the same command again goes on where it stopped.

One JSON line says which conversion this is (plan, and the source's sizes and times); each further line
lists jobs whose data is synced, with what they found out. A torn last line, from a crash while writing,
is ignored. The file is locked: two runs of the same conversion never write into one another.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from precisionctl.errors import OutputError


@dataclass
class Journal:
    """`done` are the names of finished jobs; `amax` the largest magnitude of each weight that was looked at.
    `fresh`: nothing was recorded here before."""

    file: IO[str]
    fresh: bool
    done: set[str] = field(default_factory=set)
    amax: dict[str, float] = field(default_factory=dict)

    def record(self, names: Iterable[str], amax: Mapping[str, float]) -> None:
        """Append finished jobs, and wait until that is on the disk."""
        names = sorted(names)
        self.done.update(names)
        self.amax.update(amax)
        self._append({"done": names, "amax": dict(amax)})

    def _append(self, line: Mapping[str, object]) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())


@contextmanager
def open_journal(path: Path, digest: str, files: Iterable[Path], *, restart: bool = False) -> Iterator[Journal]:
    """The journal at `path`, locked; emptied for a `restart`.

    Raises OutputError where it belongs to another conversion or is in use.
    """
    header = {"plan": digest, "source": [_fingerprint(file) for file in files]}
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OutputError("another run is writing this output", where=path, do="Wait for it to end.") from None
        file.seek(0)
        lines, length = ([], 0) if restart else _whole_lines(file.read())
        file.truncate(length)
        journal = Journal(file, fresh=not lines)
        if journal.fresh:
            journal._append(header)
        elif lines[0] != json.loads(json.dumps(header)):
            raise OutputError(
                "unfinished output of another conversion, or of a source that has changed since",
                where=path,
                do="Run with --restart to discard it, or choose another destination.",
            )
        for line in lines[1:]:
            journal.done.update(line["done"])
            journal.amax.update(line["amax"])
        yield journal


def _fingerprint(file: Path) -> list[object]:
    status = file.stat()
    return [file.name, status.st_size, status.st_mtime_ns]


def _whole_lines(text: str) -> tuple[list[dict[str, dict[str, float]]], int]:
    """Lines as JSON up to the first that is torn, and the bytes that they take."""
    lines, length = [], 0
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
        length += len(line.encode())
    return lines, length
