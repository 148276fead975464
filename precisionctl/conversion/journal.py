"""Journal: what is done and on the disk, so that the same command again goes on where it stopped.

One JSON line says which conversion this is (plan, and the source's sizes and times); each further line
lists jobs whose data is synced, with what they found out. A torn last line, from a crash while writing,
is ignored. The file is locked: two runs of the same conversion never write into one another.
"""

import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from precisionctl.checkpoints.output import Output, lock, open_kept
from precisionctl.conversion.findings import Findings
from precisionctl.errors import OutputError

PATIENCE = 3.0
"""Seconds to wait for the lock: workers of a run that was killed hold it until they notice, at the end of a job."""

_LARGEST = 256 << 20
"""Bytes of a journal: of some million jobs."""

_ANY = "latin-1"
"""What is written here is ASCII; after a crash of the machine any bytes may be there, and each is a letter."""


@dataclass
class Journal:
    """`done` are the names of finished jobs; `found` what these found out."""

    file: IO[str]
    done: set[str] = field(default_factory=set)
    found: Findings = field(default_factory=Findings)

    def record(self, names: Iterable[str], found: Findings) -> None:
        """Append finished jobs, and wait until that is on the disk."""
        names = sorted(names)
        self.done.update(names)
        self.found |= found
        self._append({"done": names, "found": found.as_json()})

    def record_whole(self) -> None:
        """Say that all is done and written but for the rename, so that a kill right after it can be told."""
        self._append({"done": [], "found": Findings().as_json(), "whole": True})

    def _append(self, line: Mapping[str, object]) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())

    def _take_up(self, lines: Iterable[Mapping[str, Any]], length: int) -> None:
        """Go on from the lines that were recorded before a stop; `length` is how many bytes of the file they take."""
        self.file.truncate(length)
        for line in lines:
            self.done.update(line["done"])
            self.found |= Findings.from_json(line["found"])


@contextmanager
def open_share_journal(output: Output, rank: int) -> Iterator[Journal]:
    """The journal of a rank that is not the first. It is in the partial directory, and is discarded with it."""
    with open_kept(output.share_journal(rank), _ANY) as file:
        lock(file, _taken(output), PATIENCE)
        journal = Journal(file)
        journal._take_up(*_whole_lines(_text(file, output)))
        yield journal


@contextmanager
def open_journal(
    output: Output, digest: str, files: Iterable[Path], *, ranks: int = 1, restart: bool = False
) -> Iterator[Journal]:
    """The locked journal of an output, and a partial directory that fits it. Both are made anew where there is nothing
    to go on with, and for a `restart`. `digest` says which conversion it is, `files` and their times which source; with
    another number of `ranks` files are dealt otherwise, so that counts too.

    Raises OutputError where journal or directory belong to something else, or another run is writing.
    """
    header = _header(digest, ranks, files)
    output.check_free()
    output.check_links()
    output.path.parent.mkdir(parents=True, exist_ok=True)
    with open_kept(output.journal, _ANY) as file:
        lock(file, _taken(output), PATIENCE)
        text = _text(file, output)
        lines, length = _whole_lines(text)
        if not restart:
            _check_ours(output, text, lines, header)
        journal = Journal(file)
        token = output.token.read_bytes() if output.token.is_file() else None
        if not restart and lines and token == str(lines[0].get("id")).encode():
            journal._take_up(lines[1:], length)
        else:
            _begin(output, journal, header)
        yield journal


def was_finished(output: Output, digest: str, files: Iterable[Path], *, ranks: int = 1) -> bool:
    """Whether what is at the destination is the whole result of this very conversion, which was killed before its
    journal was removed. Then that is removed now.

    Raises DestinationExists where something else is there.
    """
    if not os.path.lexists(output.path):
        return False
    if os.path.lexists(output.journal) and not os.path.lexists(output.partial):
        with open_kept(output.journal, _ANY) as file:
            lock(file, _taken(output), PATIENCE)
            lines, _ = _whole_lines(_text(file, output))
            if _is_of(lines, _header(digest, ranks, files)) and lines[-1].get("whole"):
                output.journal.unlink(missing_ok=True)
                return True
    output.check_free()
    return False


def _header(digest: str, ranks: int, files: Iterable[Path]) -> dict[str, object]:
    return {"plan": digest, "ranks": ranks, "source": fingerprints(files)}


def _is_of(lines: list[dict[str, Any]], header: Mapping[str, object]) -> bool:
    """Whether these are the lines of a journal with this header."""
    return bool(lines) and {key: lines[0].get(key) for key in header} == json.loads(json.dumps(header))


def _taken(output: Output) -> OutputError:
    return OutputError("another run is writing this output", where=output.path, do="Wait for it.")


def _check_ours(output: Output, text: str, lines: list[dict[str, Any]], header: Mapping[str, object]) -> None:
    """Raise OutputError for a partial directory without a journal, or a journal with another header: they are of
    another conversion."""
    partial = output.partial.is_dir() and any(output.partial.iterdir())
    torn = "\n" not in text and text.startswith('{"plan": ')  # our own first line, and a crash
    if (not partial and (torn or not text)) or _is_of(lines, header):
        return
    if not text:
        output.journal.unlink()  # it was made by looking for it
    raise OutputError(
        "unfinished output of another conversion is there, or of a source that has changed since",
        where=output.journal if text else output.partial,
        do="Run with --restart to discard it, or choose another destination.",
    )


def _begin(output: Output, journal: Journal, header: Mapping[str, object]) -> None:
    """Begin from nothing. The header names the directory's token, so that a journal is believed only beside the
    directory that it was begun with."""
    output.begin()
    journal.file.truncate(0)
    identity = uuid.uuid4().hex
    journal._append({**header, "id": identity})
    output.token.write_text(identity)


def fingerprints(files: Iterable[Path]) -> list[list[object]]:
    """Name, size and time of each file: what tells that a source has changed."""
    return [[file.name, (status := file.stat()).st_size, status.st_mtime_ns] for file in files]


def _text(file: IO[str], output: Output) -> str:
    """All of a journal. Raises OutputError for what is too large to be one: holes cost nothing on a disk."""
    if os.fstat(file.fileno()).st_size > _LARGEST:
        what = f"larger than {_LARGEST >> 20} MB, as no journal is"
        raise OutputError(what, where=output.journal, do="Remove it, or choose another destination.")
    file.seek(0)
    return file.read()


def _whole_lines(text: str) -> tuple[list[dict[str, Any]], int]:
    """All lines before the first that is torn or not ours, and how many bytes these lines take."""
    lines: list[dict[str, Any]] = []
    length = 0
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(said, dict) or (lines and not _is_record(said)):
            break
        lines.append(said)
        length += len(line)
    return lines, length


def _is_record(line: dict[str, Any]) -> bool:
    match line:
        case {"done": list(done), "found": dict(found)}:
            with suppress(ValueError):
                Findings.from_json(found)
                return all(isinstance(name, str) for name in done)
    return False
