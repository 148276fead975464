"""Archives of torch.save that lie about themselves, read as skeletons."""

import io
import zipfile
from pathlib import Path

import pytest
import torch

from precisionctl.checkpoints import torch_zip
from precisionctl.errors import CheckpointError, DamagedCheckpoint, UnsafePickle
from precisionctl.fp8.opcodes import Global, Made, Persistent, dumps


def archive(path: Path, data: bytes, storages: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("x/data.pkl", data)
        for name, content in storages.items():
            file.writestr(f"x/data/{name}", content)
    return path


def tensor(offset: object, shape: object, stride: object, name: object = "0") -> Made:
    storage = Persistent(("storage", Global("torch", "FloatStorage"), name, "cpu", 4))
    hooks = Made(Global("collections", "OrderedDict"), ())
    return Made(Global("torch._utils", "_rebuild_tensor_v2"), (storage, offset, shape, stride, False, hooks))


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
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_tensor_that_lies_is_refused(tmp_path: Path, wrong: str) -> None:
    path = archive(tmp_path / "file", dumps({"model": {"a": WRONG[wrong]}}, 2), {"0": bytes(16)})
    with pytest.raises(DamagedCheckpoint):
        torch_zip.skeleton(path)


def test_what_is_no_tensor_of_the_allow_list_is_refused(tmp_path: Path) -> None:
    for gadget in (("os", "system"), ("torch", "load"), ("torch.storage", "_load_from_bytes"), ("builtins", "eval")):
        path = archive(tmp_path / "file", dumps(Made(Global(*gadget), ("touch executed",)), 2), {})
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
    hole = (1 << 32) - 16
    entry, end = data.rindex(b"PK\1\2"), data.rindex(b"PK\5\6")
    data[entry + 20 : entry + 28] = hole.to_bytes(4, "little") * 2
    data[end + 16 : end + 20] = 0xFFFFFFF0.to_bytes(4, "little")
    head = bytes(data[:entry])
    with open(path, "wb") as out:
        out.write(head)
        out.truncate(0xFFFFFFF0)
        out.seek(0xFFFFFFF0)
        out.write(data[entry:])
    with pytest.raises(DamagedCheckpoint, match="of more than"):
        torch_zip.skeleton(path)


def test_a_file_of_a_pytorch_before_1_6_is_said_to_be_one(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "file", _use_new_zipfile_serialization=False)
    with pytest.raises(DamagedCheckpoint, match=r"since PyTorch 1\.6"):
        torch_zip.skeleton(tmp_path / "file")
