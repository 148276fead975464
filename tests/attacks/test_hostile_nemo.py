"""Archives of NeMo that lie, or lead elsewhere: one error each, and soon."""

import io
import json
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nemo_files
import pytest
import torch

from precisionctl.checkpoints.nemo.files import files_of
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import DamagedCheckpoint, UnknownFormat, UnsafePickle
from precisionctl.planning.make_plan import make_plan


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    nemo_files.write_config(tmp_path / "nemo", nemo_files.FIELDS)
    nemo_files.write_ranks(tmp_path / "nemo", [nemo_files.STATE])
    return tmp_path / "nemo"


@pytest.fixture
def zarr(tmp_path: Path) -> Path:
    nemo_files.write_config(tmp_path / "nemo", nemo_files.FIELDS)
    nemo_files.write_zarr(tmp_path / "nemo" / "model_weights", nemo_files.STATE)
    return tmp_path / "nemo"


def plan_of(path: Path) -> None:
    make_plan(open_checkpoint(path), "hf")


def entry(name: str, data: bytes = b"", **fields: Any) -> Callable[[tarfile.TarFile], None]:
    def add(tar: tarfile.TarFile) -> None:
        one = tarfile.TarInfo(name)
        one.size = len(data)
        for field, value in fields.items():
            setattr(one, field, value)
        tar.addfile(one, io.BytesIO(data))

    return add


def twice(tar: tarfile.TarFile) -> None:
    entry("./model_config.yaml", b"num_layers: 1")(tar)


def negative(tar: tarfile.TarFile) -> None:
    """A size of -1024, which would lead back to where the entry is."""
    block = bytearray(tarfile.TarInfo("a").tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"\xff" * 10 + b"\xfc\x00"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    assert tar.fileobj
    tar.fileobj.write(block)


BEYOND: dict[str, tuple[Callable[[tarfile.TarFile], None], str]] = {
    "an absolute name": (entry("/etc/passwd"), "leads out"),
    "a name above": (entry("./a/../../b"), "leads out"),
    "a link": (entry("a", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "a link"),
    "a hard link": (entry("a", type=tarfile.LNKTYPE, linkname="/etc/passwd"), "a link"),
    "a device": (entry("a", type=tarfile.CHRTYPE), "no plain file"),
    "a pipe": (entry("a", type=tarfile.FIFOTYPE), "no plain file"),
    "an old sparse file": (entry("a", type=tarfile.GNUTYPE_SPARSE), "no plain file"),
    "a sparse file": (entry("a", pax_headers={"GNU.sparse.realsize": "1000000000000"}), "GNU.sparse"),
    "a header for all": (entry("a", b"", type=tarfile.XGLTYPE), "no plain file"),
    "a name twice": (twice, "twice"),
    "a negative size": (negative, "bytes of 'a'"),
    "a size in words": (entry("a", pax_headers={"size": "much"}), "invalid literal"),
    "a size beyond the end": (entry("a", pax_headers={"size": "99999999"}), "99999999 bytes"),
    "a name without end": (entry("a", pax_headers={"path": "a" * 20000}), "an extended header of"),
    "records that do not go on": (entry("x", b"0 a=b\n", type=tarfile.XHDTYPE), "an extended header"),
}


@pytest.mark.parametrize("name", BEYOND)
def test_an_entry_that_nemo_does_not_write_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    add, said = BEYOND[name]
    with tarfile.open(tmp_path / "m.nemo", "w:", format=tarfile.PAX_FORMAT) as tar:
        tar.add(folder, arcname=".")
        add(tar)
    began = time.process_time()
    with pytest.raises(DamagedCheckpoint, match=said):
        open_checkpoint(tmp_path / "m.nemo")
    assert time.process_time() - began < 1


def cuts(whole: bytes) -> Iterator[bytes]:
    yield from (whole[:at] for at in (0, 1, 511, 512, 1024, 2048, len(whole) // 2, whole.index(b"PK\3\4") + 9))


def test_a_truncated_or_changed_archive_is_refused(folder: Path, tmp_path: Path) -> None:
    path = nemo_files.pack(folder, tmp_path / "m.nemo")
    whole = path.read_bytes()
    plan_of(path)
    for data in (*cuts(whole), b"x" + whole[1:], whole[:300] + b"\xff" + whole[301:], bytes(10240)):
        path.write_bytes(data)
        with pytest.raises(DamagedCheckpoint):
            plan_of(path)


def test_an_archive_of_many_empty_files_is_refused_soon(tmp_path: Path) -> None:
    header = tarfile.TarInfo("a").tobuf()
    (tmp_path / "m.nemo").write_bytes(header * 100_000 + bytes(1024))
    began = time.process_time()
    with pytest.raises(DamagedCheckpoint, match="twice"):
        open_checkpoint(tmp_path / "m.nemo")
    assert time.process_time() - began < 1


class Shout:
    def __reduce__(self) -> Any:
        return os.system, ("echo executed",)


def test_nothing_in_an_archive_is_executed(folder: Path, tmp_path: Path) -> None:
    torch.save(nemo_files.STATE | {"model.x": Shout()}, folder / "model_weights.ckpt")
    with pytest.raises(UnsafePickle):
        open_checkpoint(nemo_files.pack(folder, tmp_path / "m.nemo"))
    (folder / "model_config.yaml").write_text("!!python/object/apply:os.system ['echo executed']")
    with pytest.raises(DamagedCheckpoint, match="no table of settings"):
        open_checkpoint(folder)


def test_names_that_are_one_without_their_prefix_are_refused(folder: Path, tmp_path: Path) -> None:
    state = torch.load(folder / "model_weights.ckpt", weights_only=True)
    name = next(iter(state))
    torch.save(state | {f"model.module.{name.removeprefix('model.')}": state[name]}, folder / "model_weights.ckpt")
    with pytest.raises(DamagedCheckpoint, match=rf"`{name}` and `model.module..*` are both `"):
        plan_of(folder)


def link_out(path: Path) -> None:
    shutil.move(path, path.parents[1] / "outside")
    path.symlink_to(path.parents[1] / "outside")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("spoil", [link_out, pipe])
@pytest.mark.parametrize("name", ["model_weights.ckpt", "0a_tokenizer.model"])
def test_a_file_that_leads_out_of_the_directory_is_refused(
    folder: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    spoil(folder / name)
    with pytest.raises(DamagedCheckpoint, match="leads out|not a file"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "lie",
    [
        {"shape": [1 << 40, 8]},
        {"shape": [0, 8]},
        {"chunks": [0, 8]},
        {"chunks": [5, 8]},
        {"chunks": [16]},
        {"chunks": [-16, -8]},
        {"shape": [1 << 62] * 60, "chunks": [1] * 60},
        {"compressor": {"id": "blosc"}},
        {"filters": [{"id": "delta"}]},
        {"order": "F"},
        {"dtype": "<f4"},
        {"dtype": "|O"},
        {"dtype": []},
        {"zarr_format": 3},
    ],
)
def test_an_array_that_lies_is_refused(zarr: Path, lie: dict[str, Any]) -> None:
    plan_of(zarr)
    path = zarr / "model_weights" / "model.output_layer.weight" / ".zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | lie))
    with pytest.raises(DamagedCheckpoint):
        plan_of(zarr)


def test_weights_in_no_known_format_are_refused(zarr: Path) -> None:
    (zarr / "model_weights" / "metadata.json").write_text('{"sharded_backend": "tensorstore"}')
    with pytest.raises(UnknownFormat, match="tensorstore"):
        open_checkpoint(zarr)


def test_a_large_text_is_not_read(zarr: Path) -> None:
    for path in (zarr / "model_weights" / "model.output_layer.weight" / ".zarray", zarr / "model_config.yaml"):
        os.truncate(path, 1 << 40)
        with pytest.raises(DamagedCheckpoint, match="B of text"):
            open_checkpoint(zarr)


def test_files_are_found_where_their_bytes_are(folder: Path, tmp_path: Path) -> None:
    found = files_of(nemo_files.pack(folder, tmp_path / "m.nemo"))
    assert {name: span.read() for name, span in found.items()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
