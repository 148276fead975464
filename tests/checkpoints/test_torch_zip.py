"""Archives of torch.save: found without loading, laid out around holes, loaded with nothing but plain values."""

import argparse
import io
import json
import signal
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from precisionctl.checkpoints.output import FileLayout
from precisionctl.checkpoints.torch_files import torch_zip, torch_zip_writer
from precisionctl.checkpoints.torch_files.torch_zip import Inert, Span
from precisionctl.checkpoints.torch_files.torch_zip_records import ALIGNMENT, lay_out_records
from precisionctl.checkpoints.torch_files.torch_zip_writer import SmallTensor
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


NAMES = st.text(st.characters(min_codepoint=33, exclude_categories=["Cs"], exclude_characters="/\\"), min_size=1)
# Not the names that an archive has anyway: Hypothesis tries the words that stand in the code, too.
NAMES = NAMES.filter(lambda name: name not in ("byteorder", "version"))
SIZES = st.integers(1, 300) | st.integers((1 << 32) - 2, (1 << 32) + 1) | st.integers(1, 1 << 37)


def read_by_pytorch(records: dict[str, bytes | int], path: Path) -> None:
    """PyTorch's own reader, which looks at both headers of a record, finds all records where they are."""
    laid_out = lay_out_records(records.items())
    FileLayout(laid_out.pieces, {}, laid_out.length).write_around(path)
    reader, holes = torch._C.PyTorchFileReader(str(path)), iter(laid_out.holes)
    assert set(reader.get_all_records()) == {*records, "version"}
    for name, content in records.items():
        at = reader.get_record_offset(name)
        assert at % ALIGNMENT == 0
        if isinstance(content, int):
            assert at == next(holes)
        else:
            assert reader.get_record(name) == content
    with zipfile.ZipFile(path) as archive:
        sizes = {name: content if isinstance(content, int) else len(content) for name, content in records.items()}
        found = {one.filename.removeprefix("archive/"): one.file_size for one in archive.infolist()}
        assert found == sizes | {"version": 2}


@given(st.dictionaries(NAMES, st.binary(max_size=200) | SIZES, min_size=1, max_size=40))
@example({"a": b"PK\7\10abcdefgh", "b": b"PK\7\10abc", "c": b""})  # like what stands behind a record
@example({"before": (1 << 32) - 200, "at the limit": b"", "behind it": b"x", "far": 1 << 36, "there": 5})
def test_pytorch_finds_every_record_of_an_archive(tmp_path_factory, records):
    read_by_pytorch(records, tmp_path_factory.mktemp("zip") / "file")


def test_an_archive_of_more_records_than_16_bits_count_is_read_too(tmp_path):
    read_by_pytorch({f"data/{number}": b"%d" % number for number in range(70_000)}, tmp_path / "file")


TEXTS = st.text(max_size=3) | st.sampled_from(["storage", "cpu", "0", "1", "torch"])
NUMBERS = st.integers(-(1 << 70), 1 << 70) | st.integers(-300, 300) | st.floats(allow_nan=False)
TENSORS = st.builds(torch.zeros, st.lists(st.integers(0, 3), max_size=3).map(tuple), dtype=st.sampled_from(DTYPES))
PLAIN = st.none() | st.booleans() | NUMBERS | TEXTS | st.binary(max_size=3) | TENSORS
PLAIN |= st.sampled_from(DTYPES) | st.binary(max_size=9).map(io.BytesIO)
KEYS = TEXTS | st.integers(0, 3)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.sampled_from("abc"), inner).map(lambda fields: argparse.Namespace(**fields))
    ),
)


def comparable(value: object) -> object:
    """What `==` compares, of a value with tensors and files."""
    match value:
        case torch.Tensor():
            return value.dtype, value.tolist()
        case io.BytesIO():
            return "BytesIO", value.getvalue()
        case argparse.Namespace():
            return "Namespace", comparable(vars(value))
        case dict():
            return {key: comparable(item) for key, item in value.items()}
        case list() | tuple():
            return type(value), [comparable(item) for item in value]
    return type(value), value


@settings(max_examples=25)
@given(VALUES)
def test_torch_load_gives_an_object_back(value):
    """Of the values that checkpoints have beside their tensors."""
    archive = torch_zip_writer.dump(value)
    with torch.serialization.safe_globals([io.BytesIO, argparse.Namespace]):
        for weights_only in (True, False):
            assert comparable(torch.load(io.BytesIO(archive), weights_only=weights_only)) == comparable(value)


def test_an_archive_of_many_tensors_takes_a_few_times_its_size_in_memory():
    tensors = {f"layers.{number}": SmallTensor(DType.float32, (2,), b"12345678") for number in range(5_000)}
    tracemalloc.start()
    try:
        archive = torch_zip_writer.dump(tensors)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(archive) < 5_000 * 450 and peak < 4 * len(archive)
    assert torch.load(io.BytesIO(archive), weights_only=True).keys() == tensors.keys()


def test_a_tensor_that_is_there_twice_is_shared_and_an_ordered_dict_stays_one() -> None:
    tensor = torch.arange(3)
    value = OrderedDict(a=tensor, b=[tensor, OrderedDict()], c=OrderedDict(one=1))
    loaded = torch.load(io.BytesIO(torch_zip_writer.dump(value)), weights_only=True)
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
    loaded = torch_zip.load(saved(value), "here")
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
