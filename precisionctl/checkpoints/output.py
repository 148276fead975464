"""Output: a directory that appears only when it is complete. Also small files written atomically, locks, and errors of
the disk."""

import errno
import fcntl
import os
import shutil
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Generic, TypeVar

from precisionctl.errors import DestinationExists, DiskProblem, OutputError

_TOKEN = ".unfinished"


@dataclass(frozen=True)
class Output:
    """A directory that appears at `path` only when it is complete; built beside it as `path.partial`."""

    path: Path

    def __post_init__(self) -> None:
        if self.path.name in ("", ".."):
            what = "the destination is an existing folder, under no name of its own"
            raise DestinationExists(what, where=self.path, do="Choose a name in it.")

    @property
    def partial(self) -> Path:
        """The directory in which it is built."""
        return self.path.with_name(self.path.name + ".partial")

    @property
    def journal(self) -> Path:
        """The first rank's journal of finished jobs (conversion/journal.py), beside the partial directory."""
        return self.path.with_name(self.path.name + ".journal")

    def check_free(self) -> None:
        """Raise DestinationExists if something is at `path`. An empty directory may be: renaming replaces it."""
        if not os.path.lexists(self.path):
            return
        if self.path.is_symlink() or not self.path.is_dir() or any(self.path.iterdir()):
            raise DestinationExists(
                "the destination already exists",
                where=self.path,
                do="Remove it and give the command again, or choose another destination: no option overwrites one.",
            )
        if os.path.ismount(self.path):
            what = "a disk is mounted there, and a mount point cannot be replaced by renaming"
            raise DestinationExists(what, where=self.path, do="Choose a directory in it.")

    @property
    def token(self) -> Path:
        """A file in the partial directory with the identity of the journal that belongs to it."""
        return self.partial / _TOKEN

    def share_journal(self, rank: int) -> Path:
        """The journal of another rank than the first, in the partial directory."""
        return self.partial / f"{_TOKEN}.{rank}"

    def check_links(self) -> None:
        """Raise OutputError if the partial directory or the journal is a link, or anything in that directory is neither
        a file nor a folder: we would write into or remove a link's target, or block on a pipe."""
        for path in (self.partial, self.journal):
            if path.is_symlink():
                raise _not_ours(path)
        for directory, folders, files in os.walk(self.partial):
            for path in (Path(directory, name) for name in (*folders, *files)):
                ours = not path.is_symlink() and (path.is_file() or path.is_dir())
                if not ours and os.path.lexists(path):  # the first rank may be removing what is there
                    raise _not_ours(path)

    def begin(self) -> None:
        """Make an empty partial directory. Raises as `check_free` and `check_links`."""
        self.check_free()
        self.check_links()
        if self.partial.exists():
            shutil.rmtree(self.partial)
        self.partial.mkdir(parents=True)

    def commit(self, on_synced: Callable[[], None] = lambda: None) -> None:
        """Sync every file, which takes as long as the disk does, then call `on_synced` and rename. Raises
        DestinationExists if something has appeared at `path` meanwhile."""
        self.check_free()
        sync_all(Path(directory, name) for directory, _, names in os.walk(self.partial) for name in (*names, os.curdir))
        on_synced()
        for file in self.partial.glob(f"{self.token.name}*"):
            file.unlink()
        os.rename(self.partial, self.path)
        sync(self.path.parent)
        self.journal.unlink(missing_ok=True)


UNFINISHED = "the unfinished result of a command that was stopped, or still runs"
GOES_ON = "The same command continues it; with --restart it begins anew."


def is_unfinished(path: Path) -> bool:
    """Whether a path is a partial directory, or one is beside the place where it is missing."""
    partial = path if path.suffix == ".partial" else Path(f"{path}.partial")
    return (partial / _TOKEN).is_file()


def directory_above(path: Path) -> Path:
    """The nearest existing directory above a path that may not exist yet."""
    return next(parent for parent in path.absolute().parents if parent.is_dir())


def sync(path: Path) -> None:
    """Sync a file or directory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_all(paths: Iterable[Path]) -> None:
    """Sync files and directories, a few at a time: a journaling file system commits them together, and one after the
    other 32 files of 4 KB took 100 ms instead of 12."""
    with ThreadPoolExecutor(4) as threads:
        deque(threads.map(sync, paths), maxlen=0)


def open_kept(path: Path, encoding: str = "utf-8") -> IO[str]:
    """Open a lock, journal or log to read and append; it is created if it does not exist, and never truncated, as the
    folder may belong to others, too.

    Raises OutputError for a link, whose target we would write into, and for anything that is not a file.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | _PLAIN, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _not_ours(path) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _not_ours(path)
    return open(handle, "a+", encoding=encoding)


Hole = TypeVar("Hole")


@dataclass(frozen=True)
class FileLayout(Generic[Hole]):
    """A file of `length` bytes without those of its tensors: `pieces` are (offset, bytes) around them, and `holes` has
    the offset at which each tensor's row-major bytes belong."""

    pieces: tuple[tuple[int, bytes], ...]
    holes: Mapping[Hole, int]
    length: int

    def write_around(self, path: Path) -> None:
        """Write a file of it, except for the holes: what an existing one has there is not changed."""
        lay_out_file(path, self.pieces, self.length)


def lay_out_file(path: Path, pieces: Iterable[tuple[int, bytes]], length: int) -> None:
    """Create a file for weights, `length` bytes long, with these pieces at their offsets. What an existing one has
    between them is not changed. Links are not followed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | _PLAIN, 0o666)
    try:
        for start, piece in pieces:
            os.pwrite(file, piece, start)
        os.ftruncate(file, length)
    finally:
        os.close(file)


_PLAIN = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
"""Create if needed, do not follow a link, do not block on a pipe."""


def _not_ours(path: Path) -> OutputError:
    return OutputError(
        "a link, a folder or a device is in the place of a file of this command",
        where=path,
        do="Remove it, or write elsewhere.",
    )


def write_then_rename(path: Path, write: Callable[[Path], object], beside: Path | None = None) -> None:
    """Write a file atomically: readers see the old or the new content, also after a crash. `write` writes to another
    path, where nothing is, in the folder `beside` if given; that is then synced and renamed."""
    new = (beside or path.parent) / f"{path.name}.new"
    new.unlink(missing_ok=True)  # left by a kill
    write(new)
    sync(new)
    os.rename(new, path)
    sync(path.parent)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a small file atomically, as `write_then_rename` does."""

    def write(new: Path) -> None:
        with open(new, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)

    write_then_rename(path, write)


def forget(file: Path) -> None:
    """Sync a file and drop it from the page cache (where the system can), so that reading it reads the disk."""
    sync(file)
    if hasattr(os, "posix_fadvise"):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


@contextmanager
def disk_problems(output: Output) -> Iterator[None]:
    """Turn OSErrors of a full, failing or read-only disk into DiskProblem, which says how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS):
            raise
        raise DiskProblem(
            f"the disk failed: {error.strerror}",
            where=output.partial,
            do=_MENDS.get(error.errno, "What is done is kept there. Make room and run the same command again."),
        ) from error


_MENDS = {
    errno.EROFS: "Choose a destination that can be written to.",
    errno.EFBIG: "What is done is kept. Raise the limit on file sizes (ulimit -f) and run the same command again.",
}


def lock(file: IO[str], taken: OutputError, patience: float = 0.0) -> None:
    """Lock an open file until it is closed. Raises `taken` if another process still has it after `patience` seconds,
    OutputError if the file system has no locks."""
    give_up = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                raise taken from None
            time.sleep(0.05)
        except OSError as error:
            raise OutputError(
                f"the file system has no locks: {error.strerror}",
                where=file.name,
                do="Choose another one, or have it mounted with locks (Lustre: -o flock).",
            ) from error
