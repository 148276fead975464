"""Paths: as programs that use the library have them, and what is said of one that may be `.`."""

import os
from pathlib import Path

StrPath = str | os.PathLike[str]


def own_name(path: Path) -> str:
    """The name of a file or directory, also of one that a path does not name: `.`, `..`."""
    return path.resolve().name if path.name in ("", "..") else path.name


def above(path: Path) -> Path:
    """The directory above, as far from the current one as the path is: of `.` it is `..`, and not `.` again."""
    return path / ".." if path.name in ("", "..") else path.parent
