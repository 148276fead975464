"""Files of strangers: that they lie where they are looked for, are files at all, and not too large to be read whole."""

from pathlib import Path

from precisionctl.errors import DamagedCheckpoint

LARGEST = 256 << 20
"""Bytes of a file that is read whole; tokenizers have up to 40 MB."""


def read_file(path: Path, directory: Path, most: int = LARGEST) -> bytes:
    """All of a file that belongs to a directory.

    Raises DamagedCheckpoint for what is no file (opening a pipe would wait for ever), lies elsewhere, or has more than
    `most` bytes: holes cost nothing on a disk, and everything in memory.
    """
    check_link(path, directory)
    if not path.is_file():
        raise DamagedCheckpoint("not a file", where=path, do="Copy the checkpoint again.")
    if path.stat().st_size > most:
        raise DamagedCheckpoint(f"larger than {most >> 20} MB, as no such file is", where=path, do="Is the copy whole?")
    return path.read_bytes()


def check_link(path: Path, directory: Path) -> None:
    """Raise DamagedCheckpoint for a symbolic link out of a directory, other than into the `blobs` of a hub's cache
    (`models--*/snapshots/<revision>/<file>` links to `models--*/blobs/<hash>`)."""
    here, there = directory.resolve(), path.resolve()
    if not there.is_relative_to(here) and there.parent != here.parent.parent / "blobs":
        raise DamagedCheckpoint(
            f"a symbolic link leads out of the directory, to {there}", where=path, do="Copy the file itself there."
        )
