"""A distributed optimizer's flat buckets: any stages, any buckets, and whatever a damaged file says."""

import dataclasses
import io
import itertools
import math
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dist_checkpoints import LAYER, MODEL, ONCE
from hypothesis import given, strategies as st
from soaking import in_soak
from torch import Tensor

from precisionctl.architectures.towers_in_bridge import TENSORS_OF_TOWERS
from precisionctl.checkpoints.base import Companions, Hints
from precisionctl.checkpoints.chunks import Box, read_tensor, write_rows
from precisionctl.checkpoints.megatron.logical import logical_tensors
from precisionctl.checkpoints.megatron.parameter_order import Modules
from precisionctl.checkpoints.torch_dist.buckets import unpack_buckets
from precisionctl.checkpoints.torch_dist.masters import differing_masters, prove_masters
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_dist.writer import TorchDistWriter
from precisionctl.checkpoints.torch_files import dcp_metadata
from precisionctl.checkpoints.torch_files.dcp_metadata import DcpPiece, DcpTensor
from precisionctl.checkpoints.torch_files.dcp_tensors import LogicalTensor, TensorPart, flat_boxes
from precisionctl.checkpoints.torch_files.torch_zip import Span
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint
from precisionctl.param import OUTPUT, TensorSpec

KINDS = ("param", "exp_avg", "exp_avg_sq")
# in the order in which Transformer Engine's modules hold them: attention.py makes linear_proj before linear_qkv
IN_ORDER = [
    "self_attention.linear_proj.weight",
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
]
HEAD, TAIL = ["embedding.word_embeddings.weight"], ["decoder.final_layernorm.weight", "output_layer.weight"]


def aligned(number: int, to: int) -> int:
    return -(-number // to) * to


def buckets_of(names: list[str], sizes: dict[str, int], largest: int | None) -> list[list[tuple[str, int]]]:
    """Of each bucket the parameters and where they start: param_and_grad_buffer.py, _ParamAndGradBuffer.__init__."""
    buckets: list[list[tuple[str, int]]] = [[]]
    end = 0
    for name in reversed(names):
        start = aligned(end, 64)
        buckets[-1].append((name, start))
        end = start + sizes[name]
        if largest is not None and end >= largest:
            buckets.append([])
            end = 0
    return [bucket for bucket in buckets if bucket]


def cuts(bucket: list[tuple[str, int]], sizes: dict[str, int], data_parallel: int) -> list[int]:
    """Where pieces begin: at parameters, at padding, and where the next data-parallel rank's share does."""
    end = bucket[-1][1] + sizes[bucket[-1][0]]
    share = aligned(end, 128 * data_parallel) // data_parallel
    places = {start for _, start in bucket} | {start + sizes[name] for name, start in bucket}
    return sorted(place for place in places | set(range(0, end, share)) | {end} if place <= end)


class Archive:
    """A file of tensors, each saved by PyTorch."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, b""

    def add(self, tensor: Tensor) -> Span:
        buffer = io.BytesIO()
        torch.save(tensor.clone(), buffer)
        self.data += buffer.getvalue()
        return Span(self.path, len(self.data) - len(buffer.getvalue()), len(buffer.getvalue()))


def save(directory: Path, layers: list[int], stages: int, largest: int | None, data_parallel: int) -> dict[str, Tensor]:
    """A checkpoint whose virtual stages have these numbers of layers; returns the optimizer's tensors by name."""
    names = [f"decoder.layers.{layer}.{name}" for layer in range(sum(layers)) for name in IN_ORDER]
    shapes = {name: ONCE[name][0] if name in ONCE else LAYER[name.split(".", 3)[3]][0] for name in HEAD + names + TAIL}
    torch.manual_seed(0)
    tensors = {f"optimizer.state.{kind}.{name}": torch.randn(shape) for kind in KINDS for name, shape in shapes.items()}
    write_weights(directory, {name: tensors[f"optimizer.state.param.{name}"].bfloat16() for name in shapes})
    archive, stored = Archive(directory / "__9_0.distcp"), {}
    sizes = {name: tensors[f"optimizer.state.param.{name}"].numel() for name in shapes}
    for number, count in enumerate(layers):
        first = sum(layers[:number])
        mine = [name for name in names if first <= int(name.split(".")[2]) < first + count]
        mine = (HEAD if number == 0 else []) + mine + (TAIL if number == len(layers) - 1 else [])
        buckets = buckets_of(mine, sizes, largest if number == 0 else None)  # only the first stage has several
        for index, bucket in enumerate(buckets):
            for kind in KINDS:
                key = (
                    f"optimizer.distributed.dp_group_idx_{number % stages}.gbuf_idx_{number // stages}"
                    f".dtype_(torch.bfloat16, torch.float32).bucket_idx_{index}.{kind}"
                )
                flat = torch.zeros(bucket[-1][1] + sizes[bucket[-1][0]])
                for name, start in bucket:
                    flat[start : start + sizes[name]] = tensors[f"optimizer.state.{kind}.{name}"].flatten()
                places = cuts(bucket, sizes, data_parallel)
                pieces = tuple(
                    DcpPiece((start,), (end - start,), archive.add(flat[start:end]))
                    for start, end in zip(places, places[1:], strict=False)
                )
                stored[key] = DcpTensor((len(flat),), DType.float32, pieces)
    archive.path.write_bytes(archive.data)
    index = dcp_metadata.read_index(directory)
    dcp_metadata.write_index(directory, dcp_metadata.Index({**index.tensors, **stored}, index.objects))
    return tensors


def write_weights(directory: Path, weights: dict[str, Tensor]) -> None:
    specs = {name: TensorSpec(tuple(tensor.shape), DType.of(tensor.dtype)) for name, tensor in weights.items()}
    model = dataclasses.replace(MODEL, num_layers=sum("linear_fc1.weight" in name for name in weights))
    writer = TorchDistWriter(directory, model, specs)
    writer.lay_out()
    for name, tensor in weights.items():
        write_rows(writer, name, 0, tensor)
    writer.finish(None)


@pytest.mark.parametrize(
    ("layers", "stages"),
    [([3], 1), ([2, 2], 2), ([1, 2, 1, 1], 2), ([0, 3, 1], 3), ([2, 1, 1, 1, 0, 1], 3)],
    ids=str,
)
@pytest.mark.parametrize(("largest", "data_parallel"), [(None, 1), (700, 4), *in_soak((1500, 2))])
def test_buckets_are_unpacked_for_any_stages_and_any_sizes(tmp_path, layers, stages, largest, data_parallel):
    tensors = save(tmp_path, layers, stages, largest, data_parallel)
    reader = TorchDistReader(tmp_path)
    assert reader.optimizer_specs.keys() == tensors.keys()
    state = SimpleNamespace(specs=reader.optimizer_specs, chunks=reader.chunks)
    for name, tensor in tensors.items():
        assert torch.equal(read_tensor(state, name), tensor), name
    assert differing_masters(reader) == []


def test_masters_of_other_parameters_are_refused_however_many_tensors_have_none() -> None:
    """Towers of a wrapper can be most of its tensors."""
    towers = {f"towers.{index}": TensorSpec((2, 2), DType.bfloat16) for index in range(350)}
    weights = {f"weight.{index}": TensorSpec((2, 2), DType.bfloat16) for index in range(291)}
    masters = {f"optimizer.state.param.{name}": TensorSpec((2, 3), DType.float32) for name in weights}
    reader = SimpleNamespace(specs=towers | weights, optimizer_specs=masters, path=Path("here"))
    with pytest.raises(DamagedCheckpoint, match="not those of the weights: 291 of 291, `weight.0` first"):
        prove_masters(reader)


def test_a_few_masters_that_are_not_their_weights_are_named_in_a_note(tmp_path, monkeypatch) -> None:
    save(tmp_path, [2], 1, None, 1)
    monkeypatch.setattr("precisionctl.checkpoints.torch_dist.masters.differing_masters", lambda reader: list("abcdef"))
    assert prove_masters(TorchDistReader(tmp_path)).endswith("is not their weight: a, b, c, d and 2 more.")


def test_a_virtual_stage_without_a_dtype_that_another_has_has_no_buffer_of_it() -> None:
    """A gated delta net's A_log is FP32 in a model in BF16. The first of a rank's two stages has no such net."""
    inside = ("0.self_attention.linear_qkv.weight", "1.self_attention.A_log", "1.self_attention.in_proj.weight")
    qkv, log, mixer = (f"decoder.layers.{name}" for name in inside)
    dtypes = {HEAD[0]: DType.bfloat16, qkv: DType.bfloat16, mixer: DType.bfloat16, log: DType.float32}
    model = {}
    for name, dtype in {**dtypes, OUTPUT: DType.bfloat16}.items():
        part = TensorPart(Box(0, 64, 0, 1), DcpPiece((0, 0), (64, 1), Span(Path("weights"), 0, 128)), 0)
        model[name] = LogicalTensor(TensorSpec((64, 1), dtype), (part,))
    # for each buffer the parameters in it, which stand there from the last to the first
    held = [("bfloat16", [qkv, HEAD[0]]), ("float32", [log]), ("bfloat16", [OUTPUT, mixer])]
    stored = {}
    for number, (dtype, names) in enumerate(held):
        for kind in KINDS:
            key = f"optimizer.distributed.dp_group_idx_0.gbuf_idx_{number}.dtype_(torch.{dtype}, torch.float32)"
            spans = [Span(Path(f"{number}.{kind}"), at, 256) for at in range(len(names))]
            pieces = tuple(DcpPiece((64 * at,), (64,), span) for at, span in enumerate(spans))
            stored[f"{key}.bucket_idx_0.{kind}"] = DcpTensor((64 * len(names),), DType.float32, pieces)
    found = unpack_buckets(stored, model, [Modules(True, True)])
    assert found is not None and len(found) == len(KINDS) * len(model)
    for number, (_, names) in enumerate(held):
        for kind, (at, name) in itertools.product(KINDS, enumerate(names)):
            (part,) = found[f"optimizer.state.{kind}.{name}"].parts
            assert (part.piece.span.path.name, part.piece.span.offset) == (f"{number}.{kind}", at), name


def test_buckets_of_some_of_the_tensor_ranks_are_not_taken_for_the_whole_optimizer() -> None:
    """Two tensor ranks cut these weights, and the buffers are of the first alone."""
    parts = tuple(
        TensorPart(Box(row, 64, 0, 1), DcpPiece((row, 0), (64, 1), Span(Path("weights"), row, 128)), 0)
        for row in (0, 64)
    )
    names = [OUTPUT, HEAD[0]]
    model = {name: LogicalTensor(TensorSpec((128, 1), DType.bfloat16), parts) for name in reversed(names)}

    def unpacked(ranks: int) -> dict[str, LogicalTensor] | None:
        stored = {}
        for rank, kind in itertools.product(range(ranks), KINDS):
            key = f"optimizer.distributed.dp_group_idx_{rank}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
            spans = [Span(Path(f"{rank}.{kind}"), at, 256) for at in range(len(names))]
            pieces = tuple(DcpPiece((64 * at,), (64,), span) for at, span in enumerate(spans))
            stored[f"{key}.bucket_idx_0.{kind}"] = DcpTensor((64 * len(names),), DType.float32, pieces)
        return unpack_buckets(stored, model, [Modules(True, True)])

    assert unpacked(1) is None
    whole = unpacked(2)
    assert whole is not None and all(len(tensor.parts) == 2 for tensor in whole.values())


@pytest.mark.parametrize("lost", [False, True])
def test_buckets_of_experts_fit_no_model_that_has_lost_what_tells_how_experts_are_cut(lost: bool) -> None:
    """How many tensor ranks share an expert follows from the parts of its linear_fc2. Without that, the model's lack is
    what a plan refuses."""
    of_experts = [f"decoder.layers.0.mlp.experts.linear_fc{number}.weight0" for number in (1, 2)]
    part = TensorPart(Box(0, 64, 0, 1), DcpPiece((0, 0), (64, 1), Span(Path("weights"), 0, 128)), 0)
    tensor = LogicalTensor(TensorSpec((64, 1), DType.bfloat16), (part,))
    model = dict.fromkeys([HEAD[0], *of_experts, OUTPUT], tensor)
    stored = {}
    for prefix, names in (("", [OUTPUT, HEAD[0]]), ("chained_1.", of_experts[::-1])):
        for kind in KINDS:
            key = f"{prefix}optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
            spans = [Span(Path(f"{prefix}{kind}"), 256 * at, 256) for at in range(len(names))]
            pieces = tuple(DcpPiece((64 * at,), (64,), span) for at, span in enumerate(spans))
            stored[f"{key}.bucket_idx_0.{kind}"] = DcpTensor((64 * len(names),), DType.float32, pieces)
    if lost:
        del model[of_experts[1]]
    found = unpack_buckets(stored, model, [Modules(True, True)])
    assert (found is None) == lost
    if found:
        assert found.keys() == {f"optimizer.state.{kind}.{name}" for kind in KINDS for name in model}


def test_tensor_ranks_that_share_an_expert_have_the_bias_behind_its_linear_fc2_whole() -> None:
    """The weight is cut by columns, and a bias is of rows (tensor_parallel/layers.py, RowParallelLinear)."""

    def cut(shape: tuple[int, int], *boxes: Box) -> LogicalTensor:
        piece = DcpPiece((0, 0), shape, Span(Path("weights"), 0, 256))
        return LogicalTensor(TensorSpec(shape, DType.bfloat16), tuple(TensorPart(box, piece, 0) for box in boxes))

    inside = "decoder.layers.0.mlp.experts"
    up, down, bias = (f"{inside}.{name}0" for name in ("linear_fc1.weight", "linear_fc2.weight", "linear_fc2.bias"))
    model = {
        HEAD[0]: cut((64, 1), Box(0, 64, 0, 1)),
        up: cut((128, 1), Box(0, 64, 0, 1), Box(64, 64, 0, 1)),
        down: cut((64, 2), Box(0, 64, 0, 1), Box(0, 64, 1, 1)),
        bias: cut((64, 1), Box(0, 64, 0, 1)),
        OUTPUT: cut((64, 1), Box(0, 64, 0, 1)),
    }
    stored = {}
    for buffer, names in {
        "optimizer.distributed.dp_group_idx_0": [OUTPUT, HEAD[0]],
        "chained_1.optimizer.distributed.dp_group_idx_0": [bias, down, up],
        "chained_1.optimizer.distributed.dp_group_idx_1": [bias, down, up],
    }.items():
        for kind in KINDS:
            key = f"{buffer}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.{kind}"
            spans = [Span(Path(f"{buffer}.{kind}"), 256 * at, 256) for at in range(len(names))]
            pieces = tuple(DcpPiece((64 * at,), (64,), span) for at, span in enumerate(spans))
            stored[key] = DcpTensor((64 * len(names),), DType.float32, pieces)
    found = unpack_buckets(stored, model, [Modules(True, True)])
    assert found is not None
    for name, wanted in model.items():
        boxes = {part.box for part in found[f"optimizer.state.param.{name}"].parts}
        assert boxes == {part.box for part in wanted.parts}, name


def test_buffers_with_one_missing_between_them_fit_no_stages() -> None:
    part = TensorPart(Box(0, 64, 0, 1), DcpPiece((0, 0), (64, 1), Span(Path("weights"), 0, 128)), 0)
    model = {name: LogicalTensor(TensorSpec((64, 1), DType.bfloat16), (part,)) for name in (HEAD[0], OUTPUT)}
    stored = {}
    for number, kind in itertools.product((0, 2), KINDS):
        key = f"optimizer.distributed.dp_group_idx_0.gbuf_idx_{number}.dtype_(torch.bfloat16, torch.float32)"
        piece = DcpPiece((0,), (64,), Span(Path(f"{number}.{kind}"), 0, 256))
        stored[f"{key}.bucket_idx_0.{kind}"] = DcpTensor((64,), DType.float32, (piece,))
    assert unpack_buckets(stored, model, [Modules(True, True)]) is None


@pytest.mark.parametrize("strange", [None, "longer", "of two dimensions", "of another dtype"])
def test_buckets_whose_kinds_are_not_alike_are_none(strange: str | None) -> None:
    """Megatron makes a flat buffer of each kind, all of a length and each of one dtype."""
    names, stored = [OUTPUT, HEAD[0]], {}
    part = TensorPart(Box(0, 64, 0, 1), DcpPiece((0, 0), (64, 1), Span(Path("weights"), 0, 128)), 0)
    model = {name: LogicalTensor(TensorSpec((64, 1), DType.bfloat16), (part,)) for name in reversed(names)}
    for kind, bucket in itertools.product(KINDS, range(2)):
        key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
        piece = DcpPiece((0,), (64,), Span(Path(kind), 256 * bucket, 256))
        stored[f"{key}.bucket_idx_{bucket}.{kind}"] = DcpTensor((64,), DType.float32, (piece,))
    last = f"{key}.bucket_idx_1.exp_avg"
    if strange == "longer":
        pieces = (*stored[last].pieces, dataclasses.replace(piece, offsets=(64,)))
        stored[last] = DcpTensor((128,), DType.float32, pieces)
    elif strange == "of two dimensions":
        one = dataclasses.replace(piece, offsets=(0, 0), sizes=(64, 1))
        stored |= {f"{key}.bucket_idx_1.{kind}": DcpTensor((64, 1), DType.float32, (one,)) for kind in KINDS}
    elif strange:
        stored[last] = dataclasses.replace(stored[last], dtype=DType.bfloat16)
    assert (unpack_buckets(stored, model, [Modules(True, True)]) is None) == (strange is not None)


@pytest.mark.parametrize("trained", [False, True])
def test_buckets_of_a_wrappers_text_model_are_unpacked_if_its_towers_are_frozen(tmp_path, monkeypatch, trained):
    """As Megatron-Bridge saves a wrapper. A trained tower is in the buckets, in an order that is not known."""
    monkeypatch.setitem(TENSORS_OF_TOWERS, "qwen2_5_vl", {})  # this one has a tensor of its own
    if trained:
        monkeypatch.setitem(ONCE, "visual.proj.weight", ((8, 8), None))
        monkeypatch.setattr(f"{__name__}.TAIL", [*TAIL, "visual.proj.weight"])
    wanted = save(tmp_path, [2], 1, None, 1)
    index = dcp_metadata.read_index(tmp_path)
    tensors = {
        key if "optimizer" in key or "visual" in key else f"language_model.{key}": one
        for key, one in index.tensors.items()
    }
    if not trained:
        archive = Archive(tmp_path / "__8_0.distcp")
        tower = DcpTensor((8, 8), DType.float32, (DcpPiece((0, 0), (8, 8), archive.add(torch.ones(8, 8))),))
        archive.path.write_bytes(archive.data)
        tensors["visual.proj.weight"] = tower
    dcp_metadata.write_index(tmp_path, dcp_metadata.Index(tensors, index.objects))
    of_a_wrapper = Hints(companions=Companions({"config.json": b'{"model_type": "qwen2_5_vl"}'}))
    reader = TorchDistReader(tmp_path, hints=of_a_wrapper)
    assert "towers.visual.proj.weight" in reader.specs
    assert (reader.optimizer_specs.keys() == wanted.keys()) == (not trained)


def places_in(box: Box) -> list[tuple[int, int]]:
    return [(box.row + row, box.column + column) for row in range(box.rows) for column in range(box.columns)]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 7)), min_size=1, max_size=3), st.data())
def test_a_flat_range_is_at_most_three_boxes_of_each_and_covers_just_its_elements(shapes, data):
    boxes = [Box(10 * index, rows, 3, columns) for index, (rows, columns) in enumerate(shapes)]
    elements = [
        (box.row + row, box.column + column)
        for box in boxes
        for row in range(box.rows)
        for column in range(box.columns)
    ]
    begin = data.draw(st.integers(0, len(elements)))
    end = data.draw(st.integers(begin, len(elements)))
    found = list(flat_boxes(boxes, begin, end))
    assert len(found) <= 3 * len(boxes)
    covered: list[tuple[int, int]] = []
    for box, offset in found:
        assert offset == len(covered)
        covered += places_in(box)
    assert covered == elements[begin:end]


@pytest.mark.parametrize("cuts_and_sizes", [[(2, 5)], [(2, 3), (1, 4)], [(1, 3), (2, 4)], [(2, 2), (3, 3)]])
def test_flat_pieces_of_shards_are_where_the_shards_elements_are(cuts_and_sizes):
    """The distributed optimizer's layout up to megatron-core 0.14: a shard's elements in one dimension, in pieces."""
    layers, cuts, pick = 2, [cut for cut, _ in cuts_and_sizes], random.Random(0)
    shape = (layers, *(cut * size for cut, size in cuts_and_sizes))
    elements = math.prod(size for _, size in cuts_and_sizes)
    numbers = torch.arange(math.prod(shape)).view(shape)
    pieces, contents, nowhere = [], {}, Span(Path("somewhere"), 0, 0)
    for layer, *place in itertools.product(range(layers), *map(range, cuts)):
        box = tuple(slice(at * size, (at + 1) * size) for at, (_, size) in zip(place, cuts_and_sizes, strict=True))
        ends = sorted({0, pick.randint(0, elements), elements})
        for begin, end in itertools.pairwise(ends):
            offsets = (layer, *place, begin)
            contents[offsets] = numbers[layer][box].flatten()[begin:end]
            pieces.append(DcpPiece(offsets, (*[1] * (1 + len(cuts)), end - begin), nowhere))
    name = "decoder.layers.mlp.linear_fc2.weight"
    whole = DcpTensor(shape, DType.float32, (DcpPiece((0,) * len(shape), shape, nowhere),))
    state = DcpTensor((layers, *cuts, elements), DType.float32, tuple(pieces))
    found = logical_tensors({name: whole, f"optimizer.state.exp_avg.{name}": state}, Path("here"))
    for layer in range(layers):
        one = found[f"optimizer.state.exp_avg.decoder.layers.{layer}.mlp.linear_fc2.weight"]
        assert one.spec == TensorSpec(shape[1:], DType.float32)
        rows = numbers[layer].view(shape[1], -1)
        for part in one.parts:
            held = contents[part.piece.offsets][part.start :][: part.box.rows * part.box.columns]
            assert [rows[place].item() for place in places_in(part.box)] == held.tolist()


def rename(directory: Path, old: str, new: str) -> None:
    index = dcp_metadata.read_index(directory)
    dcp_metadata.write_index(
        directory, dcp_metadata.Index({k.replace(old, new): t for k, t in index.tensors.items()}, index.objects)
    )


def test_overlapping_pieces_of_a_bucket_are_refused(tmp_path):
    save(tmp_path, [2], 1, None, 1)
    index = dcp_metadata.read_index(tmp_path)
    (key,) = [key for key in index.tensors if key.endswith("bucket_idx_0.param")]
    first, second, *rest = index.tensors[key].pieces
    grown = dataclasses.replace(index.tensors[key], pieces=(first, dataclasses.replace(second, offsets=(1,)), *rest))
    dcp_metadata.write_index(tmp_path, dcp_metadata.Index({**index.tensors, key: grown}, index.objects))
    with pytest.raises(DamagedCheckpoint, match="do not make one tensor"):
        TorchDistReader(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dp_group_idx_0", "dp_group_idx_999999"),
        ("dp_group_idx_1", "dp_group_idx_7"),
        ("gbuf_idx_0", "gbuf_idx_999"),
        ("bucket_idx_0", "bucket_idx_999999"),
        ("gbuf_idx_0.dtype_(torch.bfloat16", "gbuf_idx_1.dtype_(torch.bfloat16"),
        ("optimizer.distributed", "chained_7.optimizer.distributed"),
        ("bucket_idx_0.exp_avg_sq", "bucket_idx_0.else"),
    ],
)
def test_buckets_that_fit_no_layout_stay_under_their_own_names_at_once(tmp_path, old, new):
    save(tmp_path, [2, 2], 2, None, 1)
    rename(tmp_path, old, new)
    start = time.monotonic()
    names = TorchDistReader(tmp_path).optimizer_specs
    assert time.monotonic() - start < 5
    assert len(names) == 6
    assert all("bucket_idx" in name for name in names)


def test_a_bucket_of_another_length_is_not_guessed_at(tmp_path):
    save(tmp_path, [2, 2], 2, None, 1)
    index = dcp_metadata.read_index(tmp_path)
    tensors = {key: _shorter(tensor) if "dp_group_idx_1" in key else tensor for key, tensor in index.tensors.items()}
    dcp_metadata.write_index(tmp_path, dcp_metadata.Index(tensors, index.objects))
    assert all("bucket_idx" in name for name in TorchDistReader(tmp_path).optimizer_specs)


def _shorter(tensor: DcpTensor) -> DcpTensor:
    return dataclasses.replace(tensor, shape=tensor.pieces[-1].offsets, pieces=tensor.pieces[:-1])


def test_a_tensor_of_endless_layers_is_refused(tmp_path):
    layers = (1 << 21) + 1
    archive = Archive(tmp_path / "__0_0.distcp")
    span = archive.add(torch.zeros(layers, 1, dtype=torch.int8))
    archive.path.write_bytes(archive.data)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    stored = DcpTensor((layers, 1), DType.int8, (DcpPiece((0, 0), (layers, 1), span),))
    dcp_metadata.write_index(tmp_path, dcp_metadata.Index({"decoder.layers.x": stored}, {}))
    with pytest.raises(DamagedCheckpoint, match="would be 4194306 tensors and parts"):
        TorchDistReader(tmp_path)
