"""Archives of torch.save: found without loading, laid out around holes, loaded with nothing but plain values."""

import argparse
import io
import json
import signal
import sys
from collections import OrderedDict
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from soaking import in_soak

from precisionctl.checkpoints.output import FileLayout
from precisionctl.checkpoints.torch_files import torch_zip, torch_zip_writer
from precisionctl.checkpoints.torch_files.torch_zip import Inert, Span
from precisionctl.checkpoints.torch_files.torch_zip_records import ALIGNMENT, lay_out_records
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, DamagedCheckpoint

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.int64, torch.bool]


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@given(st.sampled_from(DTYPES), st.lists(st.integers(1, 5), max_size=4), st.integers(0, 200))
def test_a_tensor_is_found_wherever_its_archive_stands_in_a_file(tmp_path_factory, dtype, shape, offset):
    tensor = (torch.randn(shape) * 100).to(dtype)
    archive = saved(tensor)
    path = tmp_path_factory.mktemp("zip") / "file"
    path.write_bytes(b"?" * offset + archive + b"behind")
    located = torch_zip.one_tensor(Span(path, offset, len(archive)), "a")
    assert (located.dtype.torch, located.shape) == (dtype, tuple(shape))
    data = path.read_bytes()[located.offset :][: tensor.nbytes]
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=dtype).view(shape), tensor)


@given(st.sampled_from(DTYPES), st.lists(st.integers(1, 5), max_size=4))
def test_torch_loads_a_record_whose_hole_was_filled(dtype, shape):
    tensor = (torch.randn(shape) * 100).to(dtype)
    record = torch_zip_writer.record(DType.of(dtype), tuple(shape))
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert len(data) == record.nbytes
    archive = record.head + data + record.tail
    assert len(archive) == record.length
    assert torch.equal(torch.load(io.BytesIO(archive), weights_only=True), tensor)


def test_a_record_of_more_than_four_gibibytes_is_found_too(tmp_path):
    record = torch_zip_writer.record(DType.bfloat16, (5 << 29,))
    path = tmp_path / "file"
    with open(path, "wb") as file:
        file.write(record.head)
        file.seek(record.nbytes, io.SEEK_CUR)
        file.write(record.tail)
    assert record.nbytes == 5 << 30
    assert torch_zip.one_tensor(Span(path, 0, record.length), "a").offset == len(record.head)


class AroundHoles(io.RawIOBase):
    """What PyTorch's own writer writes, and where: a hole is a relative seek."""

    def __init__(self) -> None:
        self.pieces = [(0, bytearray())]

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data) -> int:
        self.pieces[-1][1].extend(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_CUR
        start, piece = self.pieces[-1]
        self.pieces.append((start + len(piece) + offset, bytearray()))
        return self.pieces[-1][0]


def written_by_torch(records: list[tuple[str, bytes | int]]) -> list[tuple[int, bytes]]:
    file = AroundHoles()
    writer = torch._C.PyTorchFileWriter(file, storage_alignment=ALIGNMENT)
    for name, content in records:
        if isinstance(content, int):
            writer.write_record_metadata(name, content)
        else:
            writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    return [(start, bytes(piece)) for start, piece in file.pieces]


BYTE_ORDER = ("byteorder", sys.byteorder.encode())
NAMES = st.text(st.characters(min_codepoint=33, exclude_categories=["Cs"], exclude_characters="/\\"), min_size=1)
# Not the names that an archive has anyway: Hypothesis tries the words that stand in the code, too.
NAMES = NAMES.filter(lambda name: name not in ("byteorder", "version"))
SIZES = st.integers(1, 300) | st.integers((1 << 32) - 2, (1 << 32) + 1) | st.integers(1, 1 << 40)


@given(st.dictionaries(NAMES, st.binary(max_size=200) | SIZES, max_size=40))
@example({"a": b"PK\7\10abcdefgh", "b": b"PK\7\10abc", "c": b""})  # like what stands behind a record
@example({"before": (1 << 32) - 200, "at the limit": b"", "behind it": b"x", "far": 1 << 36, "there": 5})
def test_an_archive_is_byte_for_byte_the_one_that_pytorch_writes(records):
    ordered = [BYTE_ORDER, *records.items()]
    ours = lay_out_records(ordered)
    assert list(ours.pieces) == written_by_torch(ordered)
    sizes = [content for _, content in ordered if isinstance(content, int)]
    ends = [hole + size for hole, size in zip(ours.holes, sizes, strict=True)]
    assert ends == [start for start, _ in ours.pieces[1:]]


@pytest.mark.parametrize("count", [10, 11, 12, 26, 27, 28, 1000, 70_000, *in_soak(1_500_000)])
def test_archives_of_many_records_are_pytorchs_too(count):
    """Its serialization id depends on the order of a hash table, which grows at 13, 29, ... names; and an archive of
    more than 65,535 records says so elsewhere."""
    records = [BYTE_ORDER, *((f"data/{number}", b"%d" % number) for number in range(count))]
    assert list(lay_out_records(records).pieces) == written_by_torch(records)


TEXTS = st.text(max_size=3) | st.sampled_from(["storage", "cpu", "0", "1", "torch"])
NUMBERS = st.integers(-(1 << 70), 1 << 70) | st.integers(-300, 300) | st.floats(allow_nan=False)
TENSORS = st.builds(torch.zeros, st.lists(st.integers(0, 3), max_size=3).map(tuple), dtype=st.sampled_from(DTYPES))
PLAIN = st.none() | st.booleans() | NUMBERS | TEXTS.map(sys.intern) | st.binary(max_size=3) | TENSORS
PLAIN |= st.sampled_from(DTYPES) | st.binary(max_size=9).map(io.BytesIO)
KEYS = TEXTS.map(sys.intern) | st.integers(0, 3)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.sampled_from("abc"), inner).map(lambda fields: argparse.Namespace(**fields))
    ),
)


@settings(max_examples=25)
@given(VALUES)
def test_an_object_is_byte_for_byte_what_torch_save_writes(value):
    """Of the values that checkpoints have beside their tensors. Equal strings are one object in both."""
    assert torch_zip_writer.dump(value) == saved(value)


def test_a_tensor_that_is_there_twice_is_shared_and_an_ordered_dict_stays_one() -> None:
    tensor = torch.arange(3)
    value = OrderedDict(a=tensor, b=[tensor, OrderedDict()], c=OrderedDict(one=1))
    assert torch_zip_writer.dump(value) == saved(value)
    laid_out = torch_zip_writer.lay_out(value)
    for data in (torch_zip_writer.dump(value), laid_out.pieces[0][1]):
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        assert type(loaded) is type(loaded["c"]) is OrderedDict and list(loaded) == ["a", "b", "c"]
        assert loaded["a"].equal(tensor) and loaded["a"].data_ptr() == loaded["b"][0].data_ptr()


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(4, 4).t(),
        torch.randn(8)[2:],
        torch.randn(1).expand(4),
        [torch.randn(2)],
        {"a": 1},
        torch.nn.Parameter(torch.randn(2)),
    ],
    ids=["transposed", "offset", "expanded", "list", "dict", "parameter"],
)
def test_only_a_plain_contiguous_tensor_is_taken_for_one(tmp_path, value):
    path = tmp_path / "file"
    path.write_bytes(saved(value))
    with pytest.raises(CheckpointError):
        torch_zip.one_tensor(Span(path, 0, path.stat().st_size), "a")


def test_objects_load_as_plain_values_and_foreign_ones_as_inert_stand_ins():
    value = {
        "args": argparse.Namespace(layers=2, dtype=torch.bfloat16, handler=signal.Signals.SIGTERM),
        "payload": io.BytesIO(b"TE 1.x"),
        "random": ("MT19937", numpy.arange(3, dtype=numpy.uint32)),
        "tensor": torch.arange(3),
    }
    loaded = torch_zip.load(torch_zip_writer.dump(value), "here")
    assert vars(loaded["args"])["layers"] == 2
    assert loaded["args"].dtype is DType.bfloat16
    assert isinstance(loaded["args"].handler, Inert)
    assert loaded["payload"].getvalue() == b"TE 1.x"
    assert loaded["random"][0] == "MT19937"
    assert isinstance(loaded["random"][1], Inert)
    assert torch.equal(loaded["tensor"], value["tensor"])


def test_equal_objects_give_equal_bytes_however_they_came_to_be():
    literal = {"iteration": 7, "args": argparse.Namespace(iteration=7, name="iteration"), "list": [("a", "a")]}
    text = json.loads('{"iteration": 7, "args": {"iteration": 7, "name": "iterat\\u0069on"}, "list": ["\\u0061", "a"]}')
    built = {**text, "args": argparse.Namespace(**text["args"]), "list": [tuple(text["list"])]}
    assert built == literal
    assert torch_zip_writer.dump(built) == torch_zip_writer.dump(literal)


def test_a_skeleton_says_where_every_tensor_of_an_object_is(tmp_path):
    base = torch.randn(6, 4).to(torch.bfloat16)
    tied = torch.nn.Parameter(torch.randn(3, 5))
    value = {
        "model": {"whole": base, "rows": base[2:4], "tied": tied, "again": tied, "scalar": torch.tensor(2.5)},
        "empty": [torch.empty(0, dtype=torch.uint8), None],
        "args": argparse.Namespace(dtype=torch.float16),
        "turned": base.t(),
    }
    torch.save(value, tmp_path / "file.pt")
    found = torch_zip.skeleton(tmp_path / "file.pt")
    for name, tensor in value["model"].items():
        located = found["model"][name]
        assert (located.dtype.torch, located.shape) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(torch_zip.read_located(tmp_path / "file.pt", located), tensor), name
    assert found["model"]["tied"] == found["model"]["again"]
    assert found["empty"][0].shape == (0,)
    assert found["args"].dtype is DType.float16
    with pytest.raises(CheckpointError, match=r"`turned` \[4, 6\] is stored transposed.*\(1, 4\).*contiguous"):
        torch_zip.contiguous(found["turned"], "turned", "here")


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint16", "uint32", "uint64"])
def test_dtypes_without_a_storage_class_are_located_and_loaded_too(tmp_path: Path, name: str) -> None:
    """torch.save names their storage as bytes, and the dtype beside the shape (torch._utils._rebuild_tensor_v3)."""
    dtype = getattr(torch, name)
    tensor = torch.arange(128, dtype=torch.uint8).view(dtype).view(4, -1)
    path, parameter = tmp_path / "file.pt", torch.nn.Parameter(tensor, requires_grad=False)
    torch.save({"whole": tensor, "rows": tensor[1:3], "turned": tensor.t(), "parameter": parameter}, path)
    found, loaded = torch_zip.skeleton(path), torch_zip.load(path.read_bytes(), path)
    for key, expected in (("whole", tensor), ("rows", tensor[1:3]), ("parameter", tensor)):
        for made in (torch_zip.read_located(path, found[key]), loaded[key]):
            assert (made.dtype, made.shape) == (dtype, expected.shape), key
            assert torch.equal(made.view(torch.uint8), expected.view(torch.uint8)), key
    assert isinstance(found["turned"], torch_zip.StridedTensor)
    torch.save(tensor, path)
    assert torch_zip.one_tensor(Span(path, 0, path.stat().st_size), "a")[:2] == (DType(name), tuple(tensor.shape))


def fill(archive: FileLayout[torch_zip_writer.Blank], path, tensors: list[torch.Tensor]) -> None:
    archive.write_around(path)
    with open(path, "r+b") as file:
        for hole, tensor in zip(archive.holes.values(), tensors, strict=True):
            file.seek(hole)
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("mmap", [True, False])
def test_torch_loads_an_object_that_was_laid_out_around_holes(tmp_path, mmap):
    tensors = [torch.randn(3, 5), torch.randn(7).to(torch.bfloat16), torch.randn(()), torch.empty(0, 4)]
    blanks = [torch_zip_writer.Blank(DType.of(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]
    names = "abcd"
    value = {"model": dict(zip(names, blanks, strict=True)), "tied": blanks[0], "step": 3, "rate": 0.1, "none": None}
    value |= {"real": torch.arange(6).view(2, 3).t(), "dtype": torch.bfloat16}
    fill(torch_zip_writer.lay_out(value), tmp_path / "file.pt", tensors)
    loaded = torch.load(tmp_path / "file.pt", weights_only=True, mmap=mmap)
    for name, tensor in zip(names, tensors, strict=True):
        assert torch.equal(loaded["model"][name], tensor), name
    assert loaded["tied"].data_ptr() == loaded["model"]["a"].data_ptr()
    assert torch.equal(loaded["real"], value["real"])
    assert (loaded["step"], loaded["rate"], loaded["none"], loaded["dtype"]) == (3, 0.1, None, torch.bfloat16)
    assert torch_zip.skeleton(tmp_path / "file.pt")["model"]["b"].shape == (7,)


def test_where_a_hole_is_follows_from_the_tensors_alone():
    blanks = {"a": torch_zip_writer.Blank(DType.bfloat16, (1 << 36,)), "b": torch_zip_writer.Blank(DType.float32, (3,))}
    short = torch_zip_writer.lay_out({"model": blanks})
    long = torch_zip_writer.lay_out({"before": "x" * 1000, "model": blanks, "payload": torch.ones(1000)})
    assert short.holes == long.holes
    assert short.length > 2 << 36
    assert long == torch_zip_writer.lay_out({"before": "x" * 1000, "model": blanks, "payload": torch.ones(1000)})


@pytest.mark.parametrize("protocol", [2, 4])
def test_arrays_of_numpy_are_not_taken_for_a_bomb(protocol: int) -> None:
    """Before protocol 3 their bytes pickle as text, which is copied twice."""
    file = io.BytesIO()
    torch.save({"sizes": numpy.zeros(50_000, numpy.int64)}, file, pickle_protocol=protocol)
    assert isinstance(torch_zip.load(file.getvalue(), "here")["sizes"], Inert)


def test_tensors_that_share_bytes_may_be_written_a_few_times_and_no_more(tmp_path: Path) -> None:
    shared = torch.ones(64, 1024)
    torch.save({f"layers.{index}.shared.weight": shared for index in range(24)}, tmp_path / "tied.bin")
    assert len(torch_zip.skeleton(tmp_path / "tied.bin")) == 24
    torch.save({f"layers.{index}.weight": shared[index % 8 :] for index in range(1600)}, tmp_path / "bomb.bin")
    with pytest.raises(DamagedCheckpoint, match="share the bytes"):
        torch_zip.skeleton(tmp_path / "bomb.bin")
