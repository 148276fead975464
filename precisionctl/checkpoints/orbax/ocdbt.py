"""OCDBT, TensorStore's key-value store in files: which keys there are, and where the value of each is.

`manifest.ocdbt` says where the newest version's B+tree begins. Its nodes are in data files, compressed with Zstandard
as a rule; a leaf has values, or says where in which data file they are. Every node has a CRC-32C. Documented in
TensorStore's repository ("Storage format" in tensorstore/kvstore/ocdbt/index.rst).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from precisionctl.checkpoints.orbax.crc32c import crc32c
from precisionctl.checkpoints.orbax.zstd_pieces import Value, read_at_most
from precisionctl.checkpoints.torch_files.torch_zip import Span
from precisionctl.errors import DamagedCheckpoint, damage, shown
from precisionctl.untrusted.safe_files import has_file

MANIFEST = "manifest.ocdbt"
_NUMBERED = re.compile(r"manifest\.[0-9a-f]{16}")
_OF_MANIFEST, _OF_NODE = 0x0CDB3A2A, 0x0CDB20DE
_LARGEST_NODE = 32 << 20
"""Bytes of a node or a manifest, decompressed. Orbax lets TensorStore put all keys into one, up to 100 MB
(`max_decoded_node_bytes`), of which MOST_KEYS need 25 bytes each and an array's description 1 kB."""
_MOST_NODES, _MOST_STORED, _MOST_BYTES, MOST_KEYS = 1 << 12, 16 << 20, 64 << 20, 1 << 18
"""Of all nodes together: how many, their bytes as they are stored, those of what they hold and of its whole names, and
the keys, nodes below and data files that they name. 512 arrays in 512 pieces each have so many keys, of 60 bytes. A
checksum takes a second for 10 MB."""


def read_keys(directory: Path) -> dict[str, Value]:
    """The keys of the newest version, and for each its value or where that is.

    Raises DamagedCheckpoint for nodes and references that contradict the format, each other or the files, for files
    outside the directory, and for more keys than any checkpoint has.
    """
    store = _Store(directory)
    root = store.root()
    found, last = dict[str, Value](), b""
    for key, value in store.entries(*root) if root else ():
        if key <= last:
            what = f"keys that do not follow each other, at {shown(key)}"
            raise DamagedCheckpoint(what, where=directory, do="Is the copy whole?")
        last = key
        with damage("a key that is no text", directory):
            found[key.decode()] = value
    return found


class _Bytes:
    """The body of a node, read from its beginning to its end."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data, self._at = memoryview(data), 0

    def take(self, length: int) -> bytes:
        if length > len(self._data) - self._at:
            raise ValueError(f"it ends {length - (len(self._data) - self._at)} bytes too early")
        self._at += length
        return bytes(self._data[self._at - length : self._at])

    def number(self) -> int:
        """An unsigned number in LEB128: seven bits of each byte, the lowest first."""
        value = 0
        for shift in range(0, 64, 7):
            if self._at >= len(self._data):
                raise ValueError("it ends inside a number")
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("a number of more than 64 bits")

    def numbers(self, count: int) -> list[int]:
        return [self.number() for _ in range(count)]

    def end(self) -> None:
        if self._at < len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes behind its end")


@dataclass(frozen=True)
class _DataFile:
    """A file by its path in the directory; `base` is the part of the path that those of its own references follow."""

    path: str
    base: str


class _Store:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files_seen: dict[str, tuple[Path, int]] = {}
        self._seen: set[Span] = set()
        self._left_stored, self._left, self._left_names = _MOST_STORED, _MOST_BYTES, MOST_KEYS

    def root(self) -> tuple[Span, str, int, bytes] | None:
        """The newest version's root: where it is, the base of its paths, its height, and the beginning of all keys.
        None where it has no keys."""
        manifest = self._directory / MANIFEST
        where, (kind, body) = manifest, self._read_manifest(manifest)
        if kind == 1:
            names = sorted(one.name for one in self._directory.iterdir() if _NUMBERED.fullmatch(one.name))
            if not names:
                raise DamagedCheckpoint("no numbered manifest beside it", where=manifest, do="Is the copy whole?")
            where = self._directory / names[-1]
            kind, body = self._read_manifest(where)
        with damage("not a manifest of OCDBT", where):
            if kind:
                raise ValueError(f"it is of kind {kind}")
            files = self._files(body, "")
            count = self._count(body)
            generations = body.numbers(count)
            if not generations or generations != sorted(set(generations)):
                raise ValueError(f"generations {shown(generations)}")
            heights = body.take(count)
            places, offsets, lengths, keys = (body.numbers(count) for _ in range(4))
            if not keys[-1]:
                return None
            file = files[places[-1]]
            return self._span(file.path, offsets[-1], lengths[-1]), file.base, heights[-1], b""

    def _read_manifest(self, path: Path) -> tuple[int, _Bytes]:
        """A manifest's kind, and its body from the references on."""
        if not has_file(path, self._directory):
            raise DamagedCheckpoint("a file is missing", where=path, do="Is the copy whole?")
        body = self._body(Span(path, 0, path.stat().st_size), _OF_MANIFEST)
        with damage("not a manifest of OCDBT", path):
            body.take(16)  # the store's uuid
            kind, _, _ = body.numbers(3)
            body.take(1)  # how version trees branch; only the newest version is read, which is in no tree
            if body.number():
                body.take(4)  # the level of compression
        return kind, body

    def _body(self, span: Span, magic: int) -> _Bytes:
        """The body of a node or manifest, whose header and checksum are right."""
        with damage("not a node of OCDBT", span):
            if span in self._seen:
                raise ValueError("two references to it")
            if span.length < 18:
                raise ValueError(f"{span.length} bytes")
            self._seen.add(span)
            self._left_stored -= span.length
            if self._left_stored < 0 or len(self._seen) > _MOST_NODES:
                raise ValueError(f"more than {_MOST_NODES} nodes or {_MOST_STORED} bytes of them, as no model has")
            data = span.read()
            header = _Bytes(data[4:-4])
            if int.from_bytes(data[:4], "big") != magic or int.from_bytes(header.take(8), "little") != len(data):
                raise ValueError("its first bytes are others")
            if int.from_bytes(data[-4:], "little") != crc32c(data[:-4]):
                raise ValueError("its checksum is another")
            version, compression = header.numbers(2)
            if version or compression > 1:
                raise ValueError(f"version {version}, compression {compression}")
            body = read_at_most(data[14:-4], compression == 1, min(_LARGEST_NODE, self._left), span)
            self._left -= len(body)
            return _Bytes(body)

    def _files(self, body: _Bytes, above: str) -> list[_DataFile]:
        """The table of a node's data files. `above` is the base of the node's own path."""
        count = self._count(body)
        lengths, bases = _lengths(body, count), body.numbers(count)
        found: list[_DataFile] = []
        for name, base in zip(self._names(body, len(above), *lengths), bases, strict=True):
            path = above + name.decode()
            odd = path and not {"", ".", ".."}.isdisjoint(path.split("/"))  # a table may have a file without a name
            if odd or "\0" in path or base > len(name):
                raise ValueError(f"a file {shown(path)}")
            found.append(_DataFile(path, above + name[:base].decode()))
        return found

    def _count(self, body: _Bytes) -> int:
        """How many names follow, of which one takes a few bits, compressed, and many objects here."""
        count = body.number()
        self._left_names -= count
        if self._left_names < 0:
            what = f"more than {MOST_KEYS} keys and data files, which is more than any model needs"
            do = "Is the copy whole? MaxText saves fewer keys with scan_layers, and from fewer devices."
            raise DamagedCheckpoint(what, where=self._directory, do=do)
        return count

    def _names(self, body: _Bytes, before: int, common: list[int], rests: list[int]) -> list[bytes]:
        """The names of such lengths, each behind `before` other bytes: a few may stand for long ones, so all count."""
        name, found = b"", list[bytes]()
        for shared, rest in zip(common, rests, strict=True):
            if shared > len(name):
                raise ValueError(f"a name that has {shared} bytes of one of {len(name)}")
            name = name[:shared] + body.take(rest)
            self._left -= before + len(name)
            if self._left < 0:
                raise ValueError(f"names of more than {_MOST_BYTES} bytes")
            found.append(name)
        return found

    def _span(self, path: str, offset: int, length: int) -> Span:
        """Bytes `[offset, offset + length)` of a data file. Raises DamagedCheckpoint for others than it has."""
        if path not in self._files_seen:
            place = self._directory / path
            if not has_file(place, self._directory):
                raise DamagedCheckpoint("a file is missing", where=place, do="Is the copy whole?")
            self._files_seen[path] = place, place.stat().st_size
        place, size = self._files_seen[path]
        if offset + length > size:
            what = f"a file of {size} bytes, of which those up to {offset + length} are needed"
            raise DamagedCheckpoint(what, where=place, do="Is the copy whole?")
        return Span(place, offset, length)

    def entries(self, span: Span, base: str, height: int, prefix: bytes) -> Iterator[tuple[bytes, Value]]:
        """Yield the keys below a node, in order. Each node is read once, and is one lower than that above it."""
        body = self._body(span, _OF_NODE)
        with damage("not a node of OCDBT", span):
            if (found := body.take(1)[0]) != height:
                raise ValueError(f"it is of height {found}, not {height}")
            files = self._files(body, base)
            count = self._count(body)
            if not count:
                raise ValueError("it has no entries")
            lengths = _lengths(body, count)
            if height:
                common = body.numbers(count)
                names = self._names(body, len(prefix), *lengths)
                places, offsets, sizes = (body.numbers(count) for _ in range(3))
                for _ in range(3):
                    body.numbers(count)  # statistics
            else:
                names = self._names(body, len(prefix), *lengths)
                sizes, kinds = body.numbers(count), body.numbers(count)
                outside = sum(kind == 1 for kind in kinds)
                places, offsets = body.numbers(outside), body.numbers(outside)
                values = [body.take(0 if kind else size) for kind, size in zip(kinds, sizes, strict=True)]
                if not {*kinds} <= {0, 1}:
                    raise ValueError(f"values of kinds {shown(sorted({*kinds}))}")
            body.end()
        if height:
            for at, name in enumerate(names):
                file = self._file(files, places[at], span)
                below = self._span(file.path, offsets[at], sizes[at])
                yield from self.entries(below, file.base, height - 1, prefix + name[: common[at]])
            return
        where = iter(zip(places, offsets, strict=True))
        for name, size, kind, value in zip(names, sizes, kinds, values, strict=True):
            if kind:
                place, offset = next(where)
                yield prefix + name, self._span(self._file(files, place, span).path, offset, size)
            else:
                yield prefix + name, value

    def _file(self, files: list[_DataFile], number: int, where: Span) -> _DataFile:
        if number >= len(files):
            raise DamagedCheckpoint(f"data file {number} of {len(files)}", where=where, do="Is the copy whole?")
        return files[number]


def _lengths(body: _Bytes, count: int) -> tuple[list[int], list[int]]:
    """Of names that follow each other: how long the part is that each has in common with the one before, and the rest
    of it."""
    return [0, *body.numbers(count - 1)] if count else [], body.numbers(count)
