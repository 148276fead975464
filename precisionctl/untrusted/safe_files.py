"""Read files from strangers: they must be files, in the directory where they seem to be, and not too large."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from precisionctl.errors import DamagedCheckpoint, damage
from precisionctl.sizes import size
from precisionctl.untrusted.safe_json import parse_json

LARGEST = 256_000_000
"""Most bytes of a file that is read at once, and of all companion files together; tokenizers have up to 40 MB."""


def has_file(path: Path, directory: Path) -> bool:
    """Whether there is a file that belongs to a directory.

    Raises DamagedCheckpoint if the path is not a file, or a link out of the directory: ignoring it would mean to read
    another checkpoint than the one that is there.
    """
    if not os.path.lexists(path):
        return False
    check_link(path, directory)
    if not path.is_file():  # opening a pipe would wait forever
        what = "not a file" if path.exists() else "a file is missing"
        raise DamagedCheckpoint(what, where=path, do="Copy the checkpoint again.")
    return True


def check_file(path: Path, directory: Path) -> None:
    """Raise DamagedCheckpoint unless there is a file that belongs to a directory, as `has_file` says."""
    if not has_file(path, directory):
        raise DamagedCheckpoint("a file is missing", where=path, do="Copy the checkpoint again.")


def read_file(path: Path, directory: Path, most: int = LARGEST) -> bytes:
    """The bytes of a file that belongs to a directory.

    Raises DamagedCheckpoint as `check_file`, for a file that the system does not read, and for more than `most` bytes:
    a sparse file takes no space on a disk, but in memory.
    """
    check_file(path, directory)
    try:
        if path.stat().st_size > most:
            what = f"larger than {size(most)}, as no such file is"
            raise DamagedCheckpoint(what, where=path, do="Is the copy whole?")
        return path.read_bytes()
    except OSError as error:
        do = "Is its disk failing, or may you not read it?"
        raise DamagedCheckpoint(f"not readable: {error.strerror}", where=path, do=do) from error


def read_json(path: Path, directory: Path, most: int = LARGEST) -> dict[str, Any]:
    """The JSON object in such a file. Raises as `read_file` and `parse_json`."""
    return parse_json(read_file(path, directory, most), path)


def read_files(paths: Iterable[Path], directory: Path) -> dict[str, bytes]:
    """The bytes of several files, by their paths in the directory, with slashes. Raises as `read_file`, and
    DamagedCheckpoint if they have more than `LARGEST` bytes together."""
    found: dict[str, bytes] = {}
    left = LARGEST
    for path in paths:
        if has_file(path, directory) and path.stat().st_size > left:
            what = f"with the files before it larger than {size(LARGEST)}, as no model's are"
            raise DamagedCheckpoint(what, where=path, do="Is the copy whole? Remove files that do not belong to it.")
        content = found[path.relative_to(directory).as_posix()] = read_file(path, directory)
        left -= len(content)
    return found


def check_link(path: Path, directory: Path) -> None:
    """Raise DamagedCheckpoint for a path that `leads_out` of the directory, and for a link to itself."""
    if leads_out(path, directory):
        raise DamagedCheckpoint(
            f"a symbolic link leads out of the directory, to {path.resolve()}",
            where=path,
            do="Such links are not followed, as they may lead anywhere. Give the directory that it leads to, or "
            "replace links by the files: as hard links (`cp -rlL LINKS NEW`) these take no space.",
        )


def leads_out(path: Path, directory: Path) -> bool:
    """Whether a path is, or goes through, a symbolic link out of a directory. Links of the hub's cache do not count:
    there `models--*/snapshots/<revision>/**/<file>` links to `models--*/blobs/<hash>`."""
    try:
        path.stat()
    except OSError as error:  # what is not there may be the directory's all the same
        if error.errno == errno.ELOOP:
            raise DamagedCheckpoint("a symbolic link that leads to itself", where=path) from None
    here, there = directory.resolve(), path.resolve()
    blobs = [parent.parent / "blobs" for parent in here.parents if parent.name == "snapshots"]
    return not there.is_relative_to(here) and there.parent not in blobs


_POINTER = b"version https://git-lfs.github.com/spec/"


def check_fetched(path: Path) -> None:
    """Raise DamagedCheckpoint for a Git LFS pointer, the few lines of text that stand in for a file that was not
    fetched (git-lfs, docs/spec.md)."""
    with open(path, "rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            what = "a pointer of Git LFS, not the file itself"
            raise DamagedCheckpoint(what, where=path, do="Fetch the files: run `git lfs pull` in that directory.")


_MOST_LENGTHS = 1 << 20
"""Bytes of LENGTHS: those of thousands of files. It is read for each."""
LENGTHS = ".lengths.json"
"""A file in a directory of headers: a JSON object with the length of each file of which only the header is there, by
name. Such a file ends where its values would begin, so no other program takes it for a whole one."""


def whole_length(path: Path) -> int | None:
    """The length of a file that only the header of is there; None for any other file. Raises DamagedCheckpoint for
    LENGTHS that are none."""
    lengths = path.parent / LENGTHS
    if not has_file(lengths, path.parent):
        return None
    with damage("not the lengths of files", lengths):
        length = read_json(lengths, path.parent, _MOST_LENGTHS).get(path.name)
        if length is not None and type(length) is not int:
            raise ValueError(f"a length that is a {type(length).__name__}")
    return length
