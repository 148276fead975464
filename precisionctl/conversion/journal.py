"""Journal: the jobs whose data is on the disk, so that the same command continues where it stopped.

The first JSON line identifies the conversion: plan, and the source's sizes and times; in a further rank's journal, the
identity of the first rank's. Each further line lists jobs whose data is synced, with their outcome. An incomplete last
line, from a crash while writing, is ignored. The file is locked, so two runs of the same conversion never write at the
same time.
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
from precisionctl.conversion.outcome import Outcome
from precisionctl.errors import DamagedCheckpoint, OutputError
from precisionctl.sizes import counted, size
from precisionctl.untrusted.safe_json import parse_json

Fingerprints = list[list[object]]
"""What `fingerprints` gives."""

PATIENCE = 3.0
"""Seconds to wait for the lock: workers of a run that was killed hold it until the end of their job."""

_MAX_BYTES = 256_000_000
"""Largest journal that is read; enough for some million jobs."""

_ANY = "latin-1"
"""A journal is ASCII, but after a crash of the machine it may contain any bytes, all of which this encoding reads."""


@dataclass
class Journal:
    """An open journal: `done` are the names of finished jobs, `outcome` what they found out, together."""

    file: IO[str]
    done: set[str] = field(default_factory=set)
    outcome: Outcome = field(default_factory=Outcome)

    def record(self, names: Iterable[str], outcome: Outcome) -> None:
        """Append finished jobs, and sync the journal."""
        names = sorted(names)
        self.done.update(names)
        self.outcome |= outcome
        self._append({"done": names, "found": outcome.as_json()})

    def record_whole(self) -> None:
        """Record that everything is written and only the rename is left, so that a kill right after the rename can be
        recognised (`was_finished`)."""
        self._append({"done": [], "found": Outcome().as_json(), "whole": True})

    def forget(self) -> None:
        """Forget all finished jobs, also on the disk: files have lost bytes of theirs, which come back as zeros."""
        self.done, self.outcome = set(), Outcome()
        self.file.seek(0)
        self.file.truncate(len(self.file.readline()))
        os.fsync(self.file.fileno())

    def _append(self, line: Mapping[str, object]) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())

    def _continue(self, lines: Iterable[Mapping[str, Any]], length: int) -> None:
        """Continue after these lines, which take `length` bytes of the file; what follows is cut off."""
        self.file.truncate(length)
        for line in lines:
            self.done.update(line["done"])
            self.outcome |= Outcome.from_json(line["found"])


@contextmanager
def open_journal(output: Output, digest: str, source: Fingerprints, *, ranks: int, restart: bool) -> Iterator[Journal]:
    """The locked journal of an output, with a partial directory that belongs to it. Both are created anew for a
    `restart`, and if there is nothing to continue.

    `digest` identifies the conversion, `source` the files that it was planned from. The number of `ranks` must also be
    the same, as it decides who writes what. Raises OutputError if journal or directory belong to something else,
    or another run is writing.
    """
    header = _header(digest, ranks, source)
    output.check_free()
    output.check_links()
    output.path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(output, output.journal) as (file, text):
        lines, length = _whole_lines(text)
        _check_made(output, text)
        if not restart:
            _check_ours(output, text, lines, header)
        journal = Journal(file)
        if not restart and lines and _token(output) == str(lines[0].get("id")).encode():
            journal._continue(lines[1:], length)
        else:
            # a rank of an earlier run may have outlived its first one, and still write what that run planned
            for share in output.partial.glob(f"{output.token.name}.*"):
                with _locked(output, share):
                    pass
            output.begin()
            file.truncate(0)
            identity = uuid.uuid4().hex
            journal._append({**header, "id": identity})
            output.token.write_text(identity)  # so that a journal is only used with the directory it was begun with
        yield journal


@contextmanager
def open_share_journal(output: Output, rank: int) -> Iterator[Journal]:
    """The journal of another rank than the first, in the partial directory that the first rank has opened."""
    token = _token(output)
    assert token is not None, "the first rank has opened its journal"
    header = {"id": token.decode(_ANY)}
    with _locked(output, output.share_journal(rank)) as (file, text):
        lines, length = _whole_lines(text)
        journal = Journal(file)
        if _is_of(lines, header):
            journal._continue(lines[1:], length)
        else:
            file.truncate(0)
            journal._append(header)
        yield journal


def was_finished(output: Output, digest: str, source: Fingerprints, *, ranks: int) -> bool:
    """Whether the destination is the complete result of this same conversion, killed after the rename and before its
    journal was removed; if so, the journal is removed now.

    Raises DestinationExists if something else is there.
    """
    if not os.path.lexists(output.path):
        return False
    if os.path.lexists(output.journal) and not os.path.lexists(output.partial):
        with _locked(output, output.journal) as (_, text):
            lines, _ = _whole_lines(text)
            if _is_of(lines, _header(digest, ranks, source)) and lines[-1].get("whole"):
                output.journal.unlink(missing_ok=True)
                return True
    output.check_free()
    return False


def _header(digest: str, ranks: int, source: Fingerprints) -> dict[str, object]:
    return {"plan": digest, "ranks": ranks, "source": source}


def _is_of(lines: list[dict[str, Any]], header: Mapping[str, object]) -> bool:
    """Whether these are the lines of a journal with this header."""
    return bool(lines) and {key: lines[0].get(key) for key in header} == json.loads(json.dumps(header))


_BEGINS = '{"plan": '
"""What the first line of a journal begins with, also of one that a crash has torn."""


def _check_made(output: Output, text: str) -> None:
    """Raise OutputError for a partial directory, or a journal of this `text`, if neither one nor the other says that a
    conversion has made it: a `restart` would remove what is somebody's."""
    names = [path.name for path in output.partial.iterdir()] if output.partial.is_dir() else []
    if text.startswith(_BEGINS) or any(name.startswith(output.token.name) for name in names) or not (text or names):
        return
    if not text:
        output.journal.unlink()  # opening it has created it
    raise OutputError(
        "it has the name of an unfinished result, and no conversion has made it",
        where=output.journal if text else output.partial,
        do="Move it away, or choose another destination.",
    )


def _check_ours(output: Output, text: str, lines: list[dict[str, Any]], header: Mapping[str, object]) -> None:
    """Raise OutputError for a partial directory without a journal, or a journal with another header: they belong to
    another conversion, or to another number of ranks."""
    partial = output.partial.is_dir() and any(output.partial.iterdir())
    torn = "\n" not in text and text.startswith(_BEGINS)  # our own first line, incomplete after a crash
    if (not partial and (torn or not text)) or _is_of(lines, header):
        return
    if not text:
        output.journal.unlink()  # opening it has created it
    ranks = lines[0].get("ranks") if lines else None
    if type(ranks) is int and _is_of(lines, {**header, "ranks": ranks}):
        raise OutputError(
            f"unfinished output of the same conversion is there, by {counted(ranks, 'rank')} instead of "
            f"{header['ranks']}",
            where=output.journal,
            do=f"Run it with {ranks} to continue, or with --restart to discard that.",
        )
    if lines and _is_of(lines, {**header, "source": lines[0].get("source")}):
        raise OutputError(
            "unfinished output of the same conversion is there, and the source has changed since",
            where=output.journal,
            do="Run with --restart to begin anew.",
        )
    raise OutputError(
        "unfinished output of another conversion is there, or of a source that has changed since",
        where=output.journal if text else output.partial,
        do="Run with --restart to discard it, or choose another destination.",
    )


def _token(output: Output) -> bytes | None:
    """The identity in the partial directory; of what is longer the beginning, as a file with holes has any length."""
    if not output.token.is_file():
        return None
    with open(output.token, "rb") as file:
        return file.read(1 << 10)


def fingerprints(files: Iterable[Path]) -> Fingerprints:
    """Name, size and modification time of each file, which show whether a source has changed."""
    return [[file.name, (status := file.stat()).st_size, status.st_mtime_ns] for file in files]


@contextmanager
def _locked(output: Output, path: Path) -> Iterator[tuple[IO[str], str]]:
    """An open journal that no other run has, and its contents. Raises OutputError for a file that is too large to be
    one."""
    with open_kept(path, _ANY) as file:
        what = "another run is writing this output, or a process of one that was killed has not ended yet"
        do = "Wait for it, or end it: `fuser -v` with this file shows it on the machine where it runs."
        lock(file, OutputError(what, where=path, do=do), PATIENCE)
        if os.fstat(file.fileno()).st_size > _MAX_BYTES:
            what = f"larger than {size(_MAX_BYTES)}, as no journal is"
            raise OutputError(what, where=path, do="Remove it, or choose another destination.")
        file.seek(0)
        yield file, file.read()


def _whole_lines(text: str) -> tuple[list[dict[str, Any]], int]:
    """All lines before the first that is incomplete or not ours, and the number of bytes that these lines take."""
    lines: list[dict[str, Any]] = []
    length = 0
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        try:
            parsed = parse_json(line.encode(_ANY), "journal")
        except DamagedCheckpoint:
            break
        if lines and not _is_record(parsed):
            break
        lines.append(parsed)
        length += len(line)
    return lines, length


def _is_record(line: dict[str, Any]) -> bool:
    """Whether a line lists finished jobs."""
    match line:
        case {"done": list(done), "found": dict(outcome)}:
            with suppress(ValueError):
                Outcome.from_json(outcome)
                return all(isinstance(name, str) for name in done)
    return False
