"""Files of strangers: that they lie where they are looked for, are files at all, and not too large to be read whole."""

import os
from collections.abc import Iterable
from pathlib import Path

from precisionctl.errors import DamagedCheckpoint

LARGEST = 256 << 20
"""Bytes of a file that is read whole, and of all that are held together; tokenizers have up to 40 MB."""


def has_file(path: Path, directory: Path) -> bool:
    """Whether there is a file that belongs to a directory.

    Raises DamagedCheckpoint for what has its name and is no file, or lies elsewhere: to pass over it would be to read
    another checkpoint than the one that is there.
    """
    if not os.path.lexists(path):
        return False
    check_link(path, directory)
    if not path.is_file():  # opening a pipe would wait for ever
        raise DamagedCheckpoint("not a file", where=path, do="Copy the checkpoint again.")
    return True


def read_file(path: Path, directory: Path, most: int = LARGEST) -> bytes:
    """All of a file that belongs to a directory.

    Raises DamagedCheckpoint for what `has_file` refuses, is not there, or has more than `most` bytes: holes cost
    nothing on a disk, and everything in memory.
    """
    if not has_file(path, directory):
        raise DamagedCheckpoint("a file is missing", where=path, do="Copy the checkpoint again.")
    if path.stat().st_size > most:
        raise DamagedCheckpoint(f"larger than {most >> 20} MB, as no such file is", where=path, do="Is the copy whole?")
    return path.read_bytes()


def read_files(paths: Iterable[Path], directory: Path) -> dict[str, bytes]:
    """All of several files that are held together, by name. Raises as `read_file`, and DamagedCheckpoint where they
    have more than `LARGEST` bytes together."""
    found: dict[str, bytes] = {}
    left = LARGEST
    for path in paths:
        if has_file(path, directory) and path.stat().st_size > left:
            what = f"with the files before it larger than {LARGEST >> 20} MB, as no model's are"
            raise DamagedCheckpoint(what, where=path, do="Is the copy whole? What is no part of the model can go.")
        found[path.name] = read_file(path, directory)
        left -= len(found[path.name])
    return found


def check_link(path: Path, directory: Path) -> None:
    """Raise DamagedCheckpoint for what `leads_out`, and for a link to itself."""
    if leads_out(path, directory):
        raise DamagedCheckpoint(
            f"a symbolic link leads out of the directory, to {path.resolve()}",
            where=path,
            do="Put there what it leads to, or give that itself.",
        )


def leads_out(path: Path, directory: Path) -> bool:
    """Whether a path is, or goes through, a symbolic link out of a directory, other than into the `blobs` of the hub's
    cache that it is in (`models--*/snapshots/<revision>/**/<file>` links to `models--*/blobs/<hash>`)."""
    try:
        here, there = directory.resolve(), path.resolve()
    except (OSError, RuntimeError):  # which of them depends on the Python
        raise DamagedCheckpoint("a symbolic link that leads to itself", where=path) from None
    blobs = [parent.parent / "blobs" for parent in here.parents if parent.name == "snapshots"]
    return not there.is_relative_to(here) and there.parent not in blobs


_POINTER = b"version https://git-lfs.github.com/spec/"


def check_fetched(path: Path) -> None:
    """Raise DamagedCheckpoint where a file was not fetched: Git LFS leaves a few lines of text, its pointer, in its
    place (git-lfs, docs/spec.md)."""
    with open(path, "rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            what = "a pointer of Git LFS, not the file itself"
            raise DamagedCheckpoint(what, where=path, do="Fetch the files: run `git lfs pull` in that directory.")
