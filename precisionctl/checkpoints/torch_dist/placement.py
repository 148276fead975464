"""Where each box of each tensor is written in a `torch_dist` directory: key, file and offset.

It follows from names and sizes alone, so the bytes are the same for any number of workers and machines.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from precisionctl.checkpoints.chunks import Box, Chunk, in_pieces, shard_boxes
from precisionctl.checkpoints.megatron.keys import count_experts, expert_of, layer_of
from precisionctl.checkpoints.output import lay_out_file
from precisionctl.checkpoints.torch_files import dcp_metadata, torch_zip, torch_zip_writer
from precisionctl.param import Parallelism, TensorSpec

_ALIGNMENT = 64
"""Bytes. Records start at multiples of it, as storages do within a record, so that tensors are aligned in the file."""

FILE_BYTES = 1 << 30
"""Most bytes of tensors in one file, so that there are files for several writers. A larger box gets its own file."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A `box` of a logical tensor `name`: the `key` of the stored tensor, the archive (`record`) that holds it, and its
    place in the stored tensor and in a file (`piece`)."""

    name: str
    key: str
    box: Box
    record: torch_zip_writer.TensorArchive
    piece: dcp_metadata.DcpPiece

    @property
    def path(self) -> Path:
        return self.piece.span.path

    @property
    def chunk(self) -> Chunk:
        return Chunk(self.box, self.path, self.piece.span.offset + len(self.record.head))

    @property
    def around(self) -> tuple[tuple[int, bytes], tuple[int, bytes]]:
        """The bytes before and after the tensor's, each with its offset."""
        at = self.piece.span.offset
        return (at, self.record.head), (at + len(self.record.head) + self.record.nbytes, self.record.tail)


@dataclass(frozen=True, slots=True)
class _Box:
    """A box of a tensor, the rank that has it, and its offsets and sizes in each dimension of the stored tensor."""

    rank: int
    name: str
    key: str
    box: Box
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Placement:
    """Every box of every tensor, file by file: `__{rank}_{n}.distcp`, as the ranks of a run of these sizes write them.

    `keys` has for each name the key it is stored under and its indices in the leading (stacked) dimensions. Boxes of
    more than `piece_bytes` are cut into several rows each.
    """

    def __init__(
        self,
        directory: Path,
        specs: Mapping[str, TensorSpec],
        keys: Mapping[str, tuple[str, tuple[int, ...]]],
        parallelism: Parallelism,
        piece_bytes: int | None = None,
    ) -> None:
        self._directory, self._specs = directory, specs
        self._placed: list[Placed] = []
        boxes = sorted(_boxes(specs, keys, parallelism, piece_bytes), key=lambda box: box.rank)
        for rank, theirs in itertools.groupby(boxes, key=lambda box: box.rank):
            number, offset, filled = 0, 0, 0
            path = self._file(rank, number)
            for box in theirs:
                record = torch_zip_writer.record(specs[box.name].dtype, box.sizes)
                if filled and filled + record.nbytes > FILE_BYTES:
                    number, offset, filled = number + 1, 0, 0
                    path = self._file(rank, number)
                span = torch_zip.Span(path, offset, record.length)
                piece = dcp_metadata.DcpPiece(box.offsets, box.sizes, span)
                self._placed.append(Placed(box.name, box.key, box.box, record, piece))
                offset += -(-record.length // _ALIGNMENT) * _ALIGNMENT
                filled += record.nbytes
        assert {placed.name for placed in self._placed} == specs.keys()

    def _file(self, rank: int, number: int) -> Path:
        return self._directory / f"__{rank}_{number}.distcp"

    @cached_property
    def chunks(self) -> Mapping[str, list[Chunk]]:
        """The chunks of each tensor."""
        found: dict[str, list[Chunk]] = {name: [] for name in self._specs}
        for placed in self._placed:
            found[placed.name].append(placed.chunk)
        return found

    @cached_property
    def stored(self) -> dict[str, dcp_metadata.DcpTensor]:
        """The stored (stacked) tensors by key: shape, dtype and all pieces."""
        pieces: dict[str, list[Placed]] = {}
        for each in self._placed:
            pieces.setdefault(each.key, []).append(each)
        stored = {}
        for key, theirs in pieces.items():
            ends = ([a + b for a, b in zip(each.piece.offsets, each.piece.sizes, strict=True)] for each in theirs)
            shape = tuple(map(max, zip(*ends, strict=True)))
            assert sum(math.prod(each.piece.sizes) for each in theirs) == math.prod(shape), key
            dtype = self._specs[theirs[0].name].dtype
            stored[key] = dcp_metadata.DcpTensor(shape, dtype, tuple(each.piece for each in theirs))
        return stored

    @property
    def free_file(self) -> Path:
        """The first rank's first file without tensors."""
        taken = {placed.path for placed in self._placed}
        return next(file for number in itertools.count() if (file := self._file(0, number)) not in taken)

    def lay_out(self) -> None:
        """Create the files with everything but the tensors' bytes. Tensors in existing files are not changed."""
        for path, boxes in itertools.groupby(self._placed, key=lambda box: box.path):
            placed = list(boxes)
            length = placed[-1].piece.span.offset + placed[-1].record.length
            lay_out_file(path, (piece for each in placed for piece in each.around), length)


def _boxes(
    specs: Mapping[str, TensorSpec],
    keys: Mapping[str, tuple[str, tuple[int, ...]]],
    parallelism: Parallelism,
    piece_bytes: int | None,
) -> Iterable[_Box]:
    layers = max((layer[0] + 1 for name in specs if (layer := layer_of(name))), default=1)
    experts = count_experts(specs) or 1
    of_experts = parallelism.tensor_of(experts=True)
    width = max(parallelism.tensor, parallelism.expert * of_experts)
    for name, spec in specs.items():
        key, at = keys[name]
        expert = expert_of(name)
        size = parallelism.tensor_of(experts=expert is not None)
        first = _stage(name, layers, parallelism.pipeline) * width
        if expert is not None:
            first += expert * parallelism.expert // experts * of_experts
        for rank, boxes in enumerate(shard_boxes(spec, size)):
            for number, box in enumerate(boxes):
                part, above = "", 0
                if spec.parallel.names:  # whose parts are stored apart, each without the rows above it
                    part = f".{spec.parallel.names[number]}"
                    above = sum(spec.parallel.rows_of_parts(spec.rows)[:number])
                room = piece_bytes or box.elements * spec.dtype.itemsize
                runs = in_pieces(box.row, box.rows, box.columns * spec.dtype.itemsize, room)
                for row, rows in runs if box.elements else [(box.row, box.rows)]:  # PyTorch writes an empty one, too
                    piece = Box(row, rows, box.column, box.columns)
                    offsets, sizes = _dimensions(spec, piece)
                    if above:
                        offsets = (offsets[0] - above, *offsets[1:])
                    yield _Box(first + rank, name, key + part, piece, (*at, *offsets), (*(1 for _ in at), *sizes))


def _stage(name: str, layers: int, stages: int) -> int:
    """The pipeline stage whose files hold a tensor, with layers distributed evenly. Readers do not depend on it."""
    layer = layer_of(name)
    if layer:
        return layer[0] * stages // layers
    return 0 if ".".join(name.split(".")[-3:]).startswith("embedding.") else stages - 1


def layers_differ(specs: Mapping[str, TensorSpec]) -> bool:
    """Whether layers differ in names, shapes or dtypes of their tensors, so that they cannot be stacked."""
    layers: dict[int, dict[str, object]] = {}
    for name, spec in specs.items():
        if layer := layer_of(name):
            before = name.partition("decoder.layers.")[0]
            layers.setdefault(layer[0], {})[before + layer[1]] = (spec.shape, spec.dtype)
    found = list(layers.values())
    return any(other != found[0] for other in found) or set(layers) != set(range(len(layers)))


def _dimensions(spec: TensorSpec, box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of a box in each dimension of its tensor. Only matrices are cut by columns."""
    if not spec.shape:
        return (), ()
    if box.columns == spec.columns:
        return (box.row, *(0 for _ in spec.shape[1:])), (box.rows, *spec.shape[1:])
    return (box.row, box.column), (box.rows, box.columns)
