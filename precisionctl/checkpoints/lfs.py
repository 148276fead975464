"""Git LFS leaves a few lines of text, its pointer, where a file was not fetched (git-lfs, docs/spec.md)."""

from pathlib import Path

from precisionctl.errors import DamagedCheckpoint

_POINTER = b"version https://git-lfs.github.com/spec/"


def check_fetched(path: Path) -> None:
    """Raise DamagedCheckpoint where a file is Git LFS's pointer to it."""
    with open(path, "rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            what = "a pointer of Git LFS, not the file itself"
            raise DamagedCheckpoint(what, where=path, do="Fetch the files: run `git lfs pull` in that directory.")
