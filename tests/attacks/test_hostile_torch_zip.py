"""Archives of torch.save that lie about themselves, read as skeletons."""

import io
import struct
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from precisionctl.checkpoints.torch_files import torch_zip
from precisionctl.errors import CheckpointError, DamagedCheckpoint, UnsafePickle
from precisionctl.untrusted.pickle_writer import Global, PersistentId, PickledObject, dumps


def archive(path: Path, data: bytes, storages: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("x/data.pkl", data)
        for name, content in storages.items():
            file.writestr(f"x/data/{name}", content)
    return path


def tensor(offset: object, shape: object, stride: object, name: object = "0") -> PickledObject:
    storage = PersistentId(("storage", Global("torch", "FloatStorage"), name, "cpu", 4))
    hooks = PickledObject(Global("collections", "OrderedDict"), ())
    return PickledObject(Global("torch._utils", "_rebuild_tensor_v2"), (storage, offset, shape, stride, False, hooks))


def untyped(shape: object, dtype: object) -> PickledObject:
    storage = PersistentId(("storage", Global("torch.storage", "UntypedStorage"), "0", "cpu", 16))
    hooks = PickledObject(Global("collections", "OrderedDict"), ())
    arguments = (storage, 0, shape, (1,), False, hooks, dtype)
    return PickledObject(Global("torch._utils", "_rebuild_tensor_v3"), arguments)


WRONG = {
    "a shape beyond the storage": tensor(0, (5,), (1,)),
    "an offset beyond the storage": tensor(4, (1,), (1,)),
    "a negative offset": tensor(-1, (1,), (1,)),
    "a negative size": tensor(0, (-1,), (1,)),
    "a size of 2**60": tensor(0, (1 << 60,), (1,)),
    "strides of zero": tensor(0, (1 << 40, 1), (1, 0)),
    "fewer strides than sizes": tensor(0, (2, 2), (2,)),
    "a size that is text": tensor(0, ("2",), (1,)),
    "a storage that is not there": tensor(0, (1,), (1,), "7"),
    "a storage with the name of a path": tensor(0, (1,), (1,), "../../secret"),
    "a shape beyond the bytes": untyped((5,), Global("torch", "uint32")),
    "a dtype that is text": untyped((1,), "uint32"),
    "a dtype that is a function": untyped((1,), Global("torch", "Size")),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_tensor_that_lies_is_refused(tmp_path: Path, wrong: str) -> None:
    path = archive(tmp_path / "file", dumps({"model": {"a": WRONG[wrong]}}, 2), {"0": bytes(16)})
    with pytest.raises(DamagedCheckpoint):
        torch_zip.skeleton(path)
    with pytest.raises(DamagedCheckpoint):
        torch_zip.load(path.read_bytes(), path)


def test_what_is_no_tensor_of_the_allow_list_is_refused(tmp_path: Path) -> None:
    for gadget in (("os", "system"), ("torch", "load"), ("torch.storage", "_load_from_bytes"), ("builtins", "eval")):
        path = archive(tmp_path / "file", dumps(PickledObject(Global(*gadget), ("touch executed",)), 2), {})
        with pytest.raises(UnsafePickle, match=gadget[1]):
            torch_zip.skeleton(path)


def test_a_compressed_storage_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "file", dumps({"a": tensor(0, (4,), (1,))}, 2), {"0": bytes(16)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(DamagedCheckpoint, match="compressed"):
        torch_zip.skeleton(path)


@pytest.mark.parametrize("cut", [0, 3, 100, -1, -30, -200])
def test_a_truncated_archive_is_refused(tmp_path: Path, cut: int) -> None:
    torch.save({"model": {"a": torch.ones(100)}}, tmp_path / "file")
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:cut])
    with pytest.raises(CheckpointError):
        torch_zip.skeleton(tmp_path / "file")


def test_sizes_in_the_directory_beyond_the_file_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "file", dumps({"a": tensor(0, (1 << 20,), (1,))}, 2), {"0": bytes(16)})
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\1\2")
    data[entry + 20 : entry + 28] = (1 << 22).to_bytes(4, "little") * 2  # compressed and plain size
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="past its end"):
        torch_zip.skeleton(path)


def test_a_pickle_as_long_as_a_hole_is_not_read(tmp_path: Path) -> None:
    """A file of 4 GiB that takes none on the disk."""
    path = tmp_path / "file"
    around = io.BytesIO()
    with zipfile.ZipFile(around, "w") as file:
        file.writestr("x/data.pkl", b"")
    data = bytearray(around.getvalue())
    entry, end = data.rindex(b"PK\1\2"), data.rindex(b"PK\5\6")
    behind = (1 << 32) - 16
    data[entry + 20 : entry + 28] = (behind - entry).to_bytes(4, "little") * 2
    data[end + 16 : end + 20] = behind.to_bytes(4, "little")
    with open(path, "wb") as out:
        out.write(data[:entry])
        out.truncate(behind)
        out.seek(behind)
        out.write(data[entry:])
    with pytest.raises(DamagedCheckpoint, match="of more than"):
        torch_zip.skeleton(path)


def test_a_file_of_a_pytorch_before_1_6_is_said_to_be_one(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "file", _use_new_zipfile_serialization=False)
    with pytest.raises(DamagedCheckpoint, match=r"since PyTorch 1\.6"):
        torch_zip.skeleton(tmp_path / "file")


def sound_archive() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(4)}, buffer)
    return buffer.getvalue()


Change = Callable[[str, bytes], Iterable[tuple[str, bytes]]]


def rezipped(change: Change, compression: int = zipfile.ZIP_STORED) -> bytes:
    """The sound archive with other entries."""
    buffer = io.BytesIO()
    sound = io.BytesIO(sound_archive())
    with (
        warnings.catch_warnings(),
        zipfile.ZipFile(sound) as before,
        zipfile.ZipFile(buffer, "w", compression) as after,
    ):
        warnings.simplefilter("ignore")  # of names that are there twice
        for name in before.namelist():
            for entry, content in change(name, before.read(name)):
                after.writestr(entry, content)
    return buffer.getvalue()


def patched(where: bytes, offset: int, value: bytes) -> bytes:
    """The sound archive with other bytes, counted from the last place where these are."""
    data = bytearray(sound_archive())
    at = data.rindex(where) + offset
    data[at : at + len(value)] = value
    return bytes(data)


def in_directory(offset: int, value: bytes) -> bytes:
    """Something else in the directory's entry of the storage."""
    return patched(b"archive/data/0", offset - 46, value)


END, END_64, LARGEST = b"PK\5\6", b"PK\6\6", b"\xff\xff\xff\xff"
GADGET = dumps(PickledObject(Global("os", "system"), ("true",)), 2)


def with_twins(name: str, content: bytes) -> list[tuple[str, bytes]]:
    return [(name, content), (name, GADGET)] if name.endswith("data.pkl") else [(name, content)]


def prepended() -> bytes:
    """Another archive before it: one that looks from the front finds the one, from the back the other."""
    return sound_archive() + sound_archive()


def commented() -> bytes:
    """Behind the directory a comment that holds another directory."""
    inner = sound_archive()
    return patched(END, 20, len(inner).to_bytes(2, "little")) + inner


TRICKS: dict[str, Callable[[], bytes]] = {
    "two entries of one name": lambda: rezipped(with_twins),
    "a compressed pickle": lambda: rezipped(lambda name, content: [(name, content)], zipfile.ZIP_DEFLATED),
    "a compressed bomb": lambda: rezipped(
        lambda name, content: [(name, bytes(1 << 26) if "/data/" in name else content)], zipfile.ZIP_DEFLATED
    ),
    "a name that leads elsewhere": lambda: rezipped(
        lambda name, content: [(name.replace("archive/data/", "archive/../data/"), content)]
    ),
    "an absolute name": lambda: rezipped(lambda name, content: [(f"/{name}", content)]),
    "no pickle": lambda: rezipped(lambda name, content: [] if name.endswith(".pkl") else [(name, content)]),
    "no storage": lambda: rezipped(lambda name, content: [] if "/data/" in name else [(name, content)]),
    "no entries": lambda: rezipped(lambda name, content: []),
    "another archive before it": prepended,
    "bytes before it": lambda: b"PK\3\4" + bytes(60) + sound_archive(),
    "another directory in a comment": commented,
    "a size of 4 GB": lambda: in_directory(24, b"\xfe\xff\xff\xff"),
    "sizes that only ZIP64 has": lambda: in_directory(20, LARGEST * 2),
    "an offset beyond the end": lambda: in_directory(42, b"\xf0\xff\xff\x7f"),
    "an offset that only ZIP64 has": lambda: in_directory(42, LARGEST),
    "a directory at another place": lambda: patched(END_64, 48, bytes(8)),
    "a directory of exabytes": lambda: patched(END_64, 40, LARGEST * 2),
    "an encrypted entry": lambda: in_directory(8, b"\x01\x00"),
    "several disks": lambda: patched(END, 4, b"\x07\x00"),
}


@pytest.mark.parametrize("name", TRICKS)
def test_an_archive_that_lies_is_refused_by_both_readers_or_read_alike(tmp_path: Path, name: str) -> None:
    """What is no lie to either gives the one tensor that the archive holds, and never another."""
    path = tmp_path / "file"
    path.write_bytes(TRICKS[name]())
    told = []
    for read in (torch_zip.skeleton, lambda path: torch_zip.load(path.read_bytes(), path)):
        try:
            told.append(read(path)["a"].shape == (4,))
        except (DamagedCheckpoint, UnsafePickle) as error:
            assert len(str(error)) < 5000
            told.append(False)
    assert not any(told) or name in ("an encrypted entry", "several disks")  # flags that change no byte of a tensor


def test_a_wrong_checksum_is_damage_where_values_are_read() -> None:
    data = bytearray(sound_archive())
    place = data.index(struct.pack("<4f", 1, 1, 1, 1))
    data[place] ^= 1
    with pytest.raises(DamagedCheckpoint, match="CRC"):
        torch_zip.load(bytes(data), "an archive")


def test_entries_that_lie_in_one_another_are_not_read_many_times(tmp_path: Path) -> None:
    """A hundred storages that are the same megabyte of the file."""
    hooks = PickledObject(Global("collections", "OrderedDict"), ())

    def one(name: str) -> PickledObject:
        storage = PersistentId(("storage", Global("torch", "ByteStorage"), name, "cpu", 1 << 20))
        return PickledObject(Global("torch._utils", "_rebuild_tensor_v2"), (storage, 0, (1 << 20,), (1,), False, hooks))

    names = [str(number) for number in range(100)]
    small = archive(tmp_path / "file", dumps([one(name) for name in names], 2), dict.fromkeys(names, bytes(8)))
    data = bytearray(small.read_bytes())
    with zipfile.ZipFile(small) as file:
        places = {entry.filename: entry.header_offset for entry in file.infolist()}
    start = data.index(b"PK\1\2")
    data[start:start] = bytes(1 << 20)
    at = start + (1 << 20)
    while (at := data.find(b"PK\1\2", at)) >= 0:
        name = data[at + 46 : at + 46 + int.from_bytes(data[at + 28 : at + 30], "little")].decode()
        if "/data/" in name:
            data[at + 20 : at + 28] = (1 << 20).to_bytes(4, "little") * 2
        at += 46
    end = data.rindex(END)
    data[end + 16 : end + 20] = (start + (1 << 20)).to_bytes(4, "little")
    assert places
    tracemalloc.start()
    with pytest.raises(DamagedCheckpoint):
        torch_zip.load(bytes(data), "an archive")
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()
