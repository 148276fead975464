"""The files of a NeMo 1 checkpoint and where their bytes are: inside a `.nemo`, or in a directory.

A `.nemo` is a plain tar (nemo/core/connectors/save_restore_connector.py, _make_nemo_file_from_folder). Nothing is
unpacked: a file in it is a range of its bytes. `tarfile` only parses single headers here: it would read as much as an
extended header asks for, and its loops and patterns are not safe on hostile archives in every supported Python.
"""

import shlex
import tarfile
from pathlib import Path, PurePosixPath

from precisionctl.checkpoints.torch_files.torch_zip import Span
from precisionctl.errors import DamagedCheckpoint, UnknownFormat, damage, shown
from precisionctl.sizes import size
from precisionctl.untrusted.safe_files import check_fetched, has_file

Files = dict[str, Span]
"""By name, without `./`."""

_BLOCK = tarfile.BLOCKSIZE
_MOST_FILES = 1 << 18
_LONGEST = 1 << 14
"""Bytes of an extended header: a name, a size and times."""
_LONGEST_END = 1 << 20
"""Bytes of the zeros behind all entries, which fill the last record."""
_LARGEST = 4_000_000
"""Bytes of a file that is text."""
_GZIP = b"\x1f\x8b"


def files_of(path: Path) -> Files:
    """The files of the checkpoint at `path`.

    Raises UnknownFormat for a compressed archive, DamagedCheckpoint for one that is truncated, for entries other than
    plain files and directories, for names that lead out or are there twice, and for links out of a directory or to
    another one.
    """
    if path.is_dir():
        found = sorted(path.rglob("*"))  # which goes into no link
        there = (one for one in found if (one.is_symlink() or not one.is_dir()) and has_file(one, path))
        return {str(one.relative_to(path)): Span(one, 0, one.stat().st_size) for one in there}
    with open(path, "rb") as file:
        if file.read(2) == _GZIP:
            do = f"Unpack it and give the directory: mkdir DIR && tar xzf {shlex.quote(str(path))} -C DIR."
            raise UnknownFormat(
                "a compressed archive of NeMo, in which nothing can be read in place", where=path, do=do
            )
    check_fetched(path)
    with damage("not a tar as NeMo writes it", path):
        return _entries(path)


def read_text(span: Span) -> bytes:
    """The bytes of a small file. Raises DamagedCheckpoint for more than 4 MB."""
    if span.length > _LARGEST:
        raise DamagedCheckpoint(f"{size(span.length)} of text, as no such file has", where=span)
    return span.read()


def _entries(path: Path) -> Files:
    found: Files = {}
    extended: dict[str, str] = {}
    at, end = 0, path.stat().st_size
    with open(path, "rb") as file:
        while True:
            file.seek(at)
            header = file.read(_BLOCK)
            if len(header) < _BLOCK:
                raise ValueError("it ends without the mark of an end")
            if not any(header):
                if file.read(_LONGEST_END).strip(b"\0") or file.read(1):
                    raise ValueError("there is more behind the mark of its end")
                return found
            entry = tarfile.TarInfo.frombuf(header, "utf-8", "replace")
            length, begin = int(extended.get("size", entry.size)), at + _BLOCK
            if length < 0 or begin + length > end:
                raise ValueError(f"{length} bytes of {shown(entry.name)} in an archive of {end}")
            at = begin + -(-length // _BLOCK) * _BLOCK
            if entry.type in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
                if length > _LONGEST:
                    raise ValueError(f"an extended header of {length} bytes")
                data = file.read(length)
                long_name = entry.type == tarfile.GNUTYPE_LONGNAME
                extended |= {"path": data.rstrip(b"\0").decode()} if long_name else _records(data)
                continue
            name, extended = extended.get("path", entry.name), {}
            if entry.type == tarfile.DIRTYPE:
                if length:  # other programs take what follows for the next entry
                    raise ValueError(f"a directory {shown(name)} of {length} bytes")
                continue
            if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                kind = "a link" if entry.type in (tarfile.SYMTYPE, tarfile.LNKTYPE) else "no plain file"
                raise DamagedCheckpoint(f"{shown(name)} in it is {kind}", where=path, do="NeMo writes none: who did?")
            inside = PurePosixPath(name)
            if inside.is_absolute() or ".." in inside.parts:
                raise DamagedCheckpoint(f"{shown(name)} in it leads out of it", where=path, do="Do not trust it.")
            if str(inside) in found:
                raise DamagedCheckpoint(f"{shown(name)} is in it twice", where=path, do="Do not trust it.")
            if len(found) == _MOST_FILES:
                raise ValueError(f"more than {_MOST_FILES} files")
            found[str(inside)] = Span(path, begin, length)


def _records(data: bytes) -> dict[str, str]:
    """The records `LENGTH KEY=VALUE\\n` of a pax header."""
    found = {}
    while data:
        digits, _, _ = data.partition(b" ")
        length = int(digits)
        key, equals, value = data[len(digits) + 1 : length].decode().partition("=")
        if not equals or not value.endswith("\n") or key.startswith("GNU.sparse"):
            raise ValueError(f"an extended header with {shown(key)}")
        found[key] = value[:-1]
        data = data[length:]
    return found
