"""torch_dist directories that are broken or hostile: one error each, before anything large is made or run."""

import io
import os
import pickle
import time
import tracemalloc
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from precisionctl.checkpoints.chunks import read_tensor, write_rows
from precisionctl.checkpoints.megatron.keys import RUN_FILE
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_dist.writer import TorchDistWriter
from precisionctl.checkpoints.torch_files import dcp_metadata, torch_zip, torch_zip_writer
from precisionctl.checkpoints.torch_files.dcp_metadata import DcpPiece, DcpTensor, Index
from precisionctl.checkpoints.torch_files.torch_zip import Span
from precisionctl.commands.source_notes import family_notes
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, DamagedCheckpoint, UnsafePickle
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import ROWS, Parallelism, TensorSpec
from precisionctl.trainer.saved import run_folder
from precisionctl.untrusted.pickle_writer import Global, PickledObject, dumps

MODEL = ModelShape("llama", 1, 8, 8, 2, 2, 4, 16, 16, 32)
NAME = "embedding.word_embeddings.weight"
WHOLE = torch.arange(128, dtype=torch.float32).view(16, 8)


class Gadget:
    """Unpickling it runs a command."""

    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path("executed").exists()


@pytest.fixture
def directory(tmp_path):
    """A sound one, of one tensor in two files."""
    made = tmp_path / "release"
    writer = TorchDistWriter(made, MODEL, {NAME: TensorSpec((16, 8), DType.float32, ROWS)}, parallelism=Parallelism(2))
    writer.lay_out()
    write_rows(writer, NAME, 0, WHOLE)
    writer.finish(None)
    assert torch.equal(read_tensor(TorchDistReader(made), NAME), WHOLE)
    return made


def change(directory: Path, **fields: object) -> None:
    """Say something else about the tensor in `.metadata`."""
    index = dcp_metadata.read_index(directory)
    spans = {key: replace(span, path=directory / span.path.name) for key, span in index.objects.items()}
    tensor = index.tensors[NAME]
    pieces = tuple(replace(p, span=replace(p.span, path=directory / p.span.path.name)) for p in tensor.pieces)
    changed = replace(replace(tensor, pieces=pieces), **{k: v(pieces) if callable(v) else v for k, v in fields.items()})
    dcp_metadata.write_index(directory, Index({NAME: changed}, spans))


def overlapping(pieces):
    return (pieces[0], replace(pieces[1], offsets=(4, 0)))


def with_a_gap(pieces):
    return pieces[:1]


def outside(pieces):
    return (pieces[0], replace(pieces[1], offsets=(12, 0)))


def beyond_the_file(pieces):
    return (pieces[0], replace(pieces[1], span=replace(pieces[1].span, length=1 << 40)))


def shifted(pieces):
    return (pieces[0], replace(pieces[1], span=Span(pieces[1].span.path, 8, pieces[1].span.length - 8)))


LIES = {
    "overlap": {"pieces": overlapping},
    "gap": {"pieces": with_a_gap},
    "outside the tensor": {"pieces": outside},
    "beyond the file": {"pieces": beyond_the_file},
    "shifted": {"pieces": shifted},
    "dtype of the same size": {"dtype": DType.int32},
    "smaller dtype": {"dtype": DType.bfloat16},
    "shape of the same size": {"shape": (8, 16)},
    "more dimensions": {"shape": (16, 8, 1)},
    "empty": {"shape": (0, 8), "pieces": ()},
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_contradicts_the_files_is_refused(directory, lie):
    change(directory, **LIES[lie])
    with pytest.raises(DamagedCheckpoint):
        read_tensor(TorchDistReader(directory), NAME)


def test_a_tensor_that_claims_to_be_huge_allocates_nothing(directory):
    layers = 1 << 40
    piece = DcpPiece((0, 0), (layers, 1), Span(directory / "__0_0.distcp", 0, 100))
    huge = DcpTensor((layers, 1), DType.float32, (piece,))
    dcp_metadata.write_index(directory, Index({"decoder.layers.x": huge}, {}))
    tracemalloc.start()
    with pytest.raises(DamagedCheckpoint):
        TorchDistReader(directory)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20


def test_tensors_on_the_same_bytes_are_refused(directory):
    """A small file would stand for any number of tensors. The masters that Megatron finds under two names are one."""
    index = dcp_metadata.read_index(directory)
    tensor = index.tensors[NAME]
    spans = {key: replace(span, path=directory / span.path.name) for key, span in index.objects.items()}
    masters = {f"optimizer.state.{kind}.{NAME}": tensor for kind in ("param", "fp32_param")}
    for tensors, refused in ((masters, False), ({NAME: tensor, f"{NAME}.copy": tensor}, True)):
        dcp_metadata.write_index(directory, Index(tensors, spans))
        with pytest.raises(DamagedCheckpoint, match="on the same bytes") if refused else nullcontext():
            TorchDistReader(directory)


@pytest.mark.parametrize("cut", [1, 100, 600])
def test_a_truncated_file_is_named(directory, cut):
    path = directory / "__1_0.distcp"
    os.truncate(path, path.stat().st_size - cut)
    with pytest.raises(DamagedCheckpoint, match="__1_0.distcp"):
        TorchDistReader(directory)


def test_a_missing_file_is_named(directory):
    (directory / "__1_0.distcp").unlink()
    with pytest.raises(DamagedCheckpoint, match="a file is missing .*__1_0.distcp"):
        TorchDistReader(directory)


def test_bytes_that_are_no_archive_are_refused_when_the_tensor_is_wanted(directory):
    path = directory / "__0_0.distcp"
    path.write_bytes(b"\0" * path.stat().st_size)
    reader = TorchDistReader(directory)
    with pytest.raises(DamagedCheckpoint, match="not what torch.save writes"):
        reader.chunks(NAME)


@pytest.mark.parametrize("name", ["../x0.distcp", "/tmp/x.distc", "./../x.distc"])
def test_a_path_out_of_the_directory_is_refused(directory, name):
    metadata = directory / ".metadata"
    assert len(name) == len("__0_0.distcp")
    metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", name.encode()))
    with pytest.raises(DamagedCheckpoint, match="outside its directory"):
        TorchDistReader(directory)


def test_a_link_out_of_the_directory_is_refused(directory, tmp_path):
    path = directory / "__0_0.distcp"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedCheckpoint, match="a symbolic link leads out of the directory"):
        TorchDistReader(directory)


METADATA = "torch.distributed.checkpoint.metadata"
HOSTILE_METADATA = {
    "gadget": pickle.dumps(Gadget()),
    "gadget inside": dumps(
        PickledObject(Global(METADATA, "Metadata"), (PickledObject(Global("os", "system"), ("touch executed",)),))
    ),
    "a class's attribute": dumps(
        PickledObject(Global("torch.distributed", "checkpoint.os.system"), ("touch executed",))
    ),
    "megatron's attribute": dumps(PickledObject(Global("megatron.os", "system"), ("touch executed",))),
}


@pytest.mark.parametrize("content", HOSTILE_METADATA)
def test_a_gadget_in_metadata_does_not_run(directory, content):
    (directory / ".metadata").write_bytes(HOSTILE_METADATA[content])
    with pytest.raises((UnsafePickle, DamagedCheckpoint)):
        TorchDistReader(directory)


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"not a pickle", b"\x80\x04N.", b"\x80\x04]."])
def test_metadata_that_is_something_else_is_refused(directory, content):
    (directory / ".metadata").write_bytes(content)
    with pytest.raises(DamagedCheckpoint):
        TorchDistReader(directory)


def archive(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_a_gadget_in_the_common_data_does_not_run(directory):
    (directory / "common.pt").write_bytes(archive({"args": Gadget()}))
    reader = TorchDistReader(directory)
    with pytest.raises(UnsafePickle, match="system"):
        _ = reader.common


def test_a_gadget_in_an_object_does_not_run(directory):
    path = directory / "__0_1.distcp"
    content = archive([Gadget()])
    path.write_bytes(content)
    span = Span(path, 0, len(content))
    dcp_metadata.write_index(directory, Index({}, {"decoder.final_layernorm._extra_state/shard_0_1": span}))
    with pytest.raises(UnsafePickle, match="system"):
        _ = TorchDistReader(directory).fp8


def test_a_gadget_in_a_tensors_archive_does_not_run(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(archive(Gadget()))
    with pytest.raises(UnsafePickle, match="system"):
        torch_zip.one_tensor(Span(path, 0, path.stat().st_size), "a")


def test_a_compressed_bomb_is_not_inflated(tmp_path):
    path = tmp_path / "common.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("common/data.pkl", b"\0" * (64 << 20))
        bomb.writestr("common/version", b"3\n")
    tracemalloc.start()
    with pytest.raises(DamagedCheckpoint, match="compressed"):
        torch_zip.load(path.read_bytes(), path)
    with pytest.raises(DamagedCheckpoint, match="compressed"):
        torch_zip.one_tensor(Span(path, 0, path.stat().st_size), "a")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20


def test_a_checkpoint_that_lost_its_common_data_is_refused_and_not_taken_for_weights_alone(directory):
    (directory / "common.pt").unlink()
    with pytest.raises(DamagedCheckpoint, match="no common.pt.*Copy the checkpoint again"):
        _ = TorchDistReader(directory).model


@pytest.mark.parametrize("content", ["", "-5", "1e3", "../release", "9" * 5000, "\0"])
def test_a_tracker_that_names_no_iteration_is_refused(directory, content):
    (directory.parent / "latest_checkpointed_iteration.txt").write_text(content)
    with pytest.raises(CheckpointError):
        TorchDistReader(directory.parent)


def test_what_a_run_says_of_itself_must_be_a_file(directory):
    said = directory / RUN_FILE
    said.parent.mkdir(exist_ok=True)
    os.mkfifo(said)
    with pytest.raises(DamagedCheckpoint, match="not a file"):
        run_folder.read_saved(TorchDistReader(directory).path)
    said.unlink()
    said.symlink_to("/etc/hostname")
    with pytest.raises(DamagedCheckpoint, match="symbolic link"):
        run_folder.read_saved(TorchDistReader(directory).path)
    reader = TorchDistReader(directory)
    with pytest.raises(DamagedCheckpoint, match="symbolic link"):
        [*family_notes(reader, reader.model, "hf", named=True)]


def test_only_a_models_companions_travel_with_it(directory, tmp_path):
    hf = directory / "precisionctl" / "hf"
    hf.mkdir(parents=True)
    weights = ("model.safetensors", "tokenizer.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
    for name in ("tokenizer.json", "fp8_state", *weights):
        (hf / name).write_bytes(b"{}")
    (hf / "tokenizer").mkdir()
    assert TorchDistReader(directory).companions.files == {"tokenizer.json": b"{}"}
    (tmp_path / "secret").write_bytes(b"secret")
    (hf / "tokenizer_config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(DamagedCheckpoint, match="symbolic link"):
        _ = TorchDistReader(directory).companions


@pytest.mark.parametrize("config", [b"[" * 100_000, b"[]", b"{", b"\xff"])
def test_a_config_that_is_none_is_refused(directory, config):
    (directory / "precisionctl" / "hf").mkdir(parents=True)
    (directory / "precisionctl" / "hf" / "config.json").write_bytes(config)
    with pytest.raises(DamagedCheckpoint, match=r"config\.json"):
        _ = TorchDistReader(directory).model


@pytest.mark.parametrize("value", [7, "text", {1}])
def test_extra_state_that_is_no_bytes_is_refused(directory, value):
    path = directory / "__0_1.distcp"
    path.write_bytes(archive([value]))
    span = Span(path, 0, path.stat().st_size)
    dcp_metadata.write_index(directory, Index({}, {"decoder.final_layernorm._extra_state/shard_0_1": span}))
    with pytest.raises(DamagedCheckpoint, match="not FP8 state"):
        _ = TorchDistReader(directory).fp8


ARGUMENTS = [
    {"num_layers": "two"},
    {"num_layers": -1},
    {"hidden_size": None},
    {"num_attention_heads": 0, "kv_channels": None},
    {"window_size": 5},
    {"window_size": ("a", 0)},
    {"rotary_base": "large"},
]


@pytest.mark.parametrize("wrong", ARGUMENTS, ids=str)
def test_arguments_that_describe_no_model_are_refused(directory, wrong):
    common = torch_zip.load((directory / "common.pt").read_bytes(), directory)
    vars(common["args"]).update(wrong)
    (directory / "common.pt").write_bytes(torch_zip_writer.dump(common))
    with pytest.raises(DamagedCheckpoint):
        _ = TorchDistReader(directory).model


def indexed(path: Path, tensors: dict[str, DcpTensor]) -> Path:
    """A directory whose only file has a megabyte."""
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (path / "__0_0.distcp").write_bytes(bytes(1 << 20))
    dcp_metadata.write_index(path, Index(tensors, {}))
    return path


def test_a_megabyte_cannot_be_a_billion_tensors_or_parts_of_them(tmp_path):
    many = 1 << 20
    span = Span(tmp_path / "__0_0.distcp", 0, many)
    column = [DcpPiece((0, i), (many, 1), span) for i in range(1000)]
    whole = DcpTensor((many,), DType.uint8, (DcpPiece((0,), (many,), span),))
    for tensors in (
        {f"decoder.layers.x{i}": whole for i in range(20)},
        {"decoder.layers.x": DcpTensor((many, 1000), DType.uint8, tuple(column))},
    ):
        tracemalloc.start()
        with pytest.raises(DamagedCheckpoint, match="tensors and parts of tensors"):
            TorchDistReader(indexed(tmp_path, tensors))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
        tracemalloc.stop()


def test_a_tensor_in_thousands_of_columns_is_checked_in_no_time(tmp_path):
    count = 6000
    spans = [Span(tmp_path / "__0_0.distcp", i, count - i) for i in range(count)]
    pieces = [DcpPiece((0, i), (1, 1), replace(span, length=1)) for i, span in enumerate(spans)]
    began = time.process_time()
    assert TorchDistReader(indexed(tmp_path, {NAME: DcpTensor((1, count), DType.uint8, tuple(pieces))})).specs
    pieces[-2:] = [DcpPiece((0, count - 3), (1, 2), spans[-2])]
    with pytest.raises(DamagedCheckpoint, match="do not make one tensor"):
        TorchDistReader(indexed(tmp_path, {NAME: DcpTensor((1, count), DType.uint8, tuple(pieces))}))
    assert time.process_time() - began < 10  # 2 x 10^7 comparisons would take longer
