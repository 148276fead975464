"""Tensors that a PyTorch distributed checkpoint (DCP) holds in pieces, and boxes of these that make a tensor of one's
own: where its parts are in the files.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from precisionctl.checkpoints.chunks import Box, Chunk, ComputedTensor, whole
from precisionctl.checkpoints.torch_files import dcp_metadata, torch_zip
from precisionctl.errors import CheckpointError, DamagedCheckpoint
from precisionctl.param import TensorSpec


@dataclass(frozen=True)
class TensorPart:
    """A box of a logical tensor, and where its elements are: from element `start` of a stored piece on."""

    box: Box
    piece: dcp_metadata.DcpPiece
    start: int


@dataclass(frozen=True)
class LogicalTensor:
    """A logical tensor and the parts that make it up."""

    spec: TensorSpec
    parts: tuple[TensorPart, ...]


class LogicalTensors:
    """Logical tensors by name, as a source."""

    def __init__(self, tensors: Mapping[str, LogicalTensor]) -> None:
        self.tensors = tensors
        self.specs: Mapping[str, TensorSpec] = {name: tensor.spec for name, tensor in tensors.items()}
        self._chunks: dict[str, tuple[Chunk, ...]] = {}

    def chunks(self, name: str) -> Sequence[Chunk]:
        """Where the parts of a tensor are in their files. Raises DamagedCheckpoint where these say something else."""
        if name not in self._chunks:
            spec, found = self.specs[name], list[Chunk]()
            for part in self.tensors[name].parts:
                piece, begin = part.piece, part.piece.span.offset
                if not piece.bare:
                    located = torch_zip.one_tensor(piece.span, name)
                    if (located.dtype, located.shape) != (spec.dtype, piece.sizes):
                        stored, wanted = f"{located.dtype} {list(located.shape)}", f"{spec.dtype} {list(piece.sizes)}"
                        raise DamagedCheckpoint(f"{name}: a piece is {stored}, not {wanted}", where=piece.span)
                    begin = located.offset
                found.append(Chunk(part.box, piece.span.path, begin + part.start * spec.dtype.itemsize))
            self._chunks[name] = tuple(found)
        return self._chunks[name]

    def spec_at(self, place: str | ComputedTensor) -> TensorSpec:
        """Of one of these tensors, or of one that is computed from one."""
        return self.specs[place] if isinstance(place, str) else TensorSpec(place.shape, self.specs[place.name].dtype)

    def chunks_at(self, place: str | ComputedTensor) -> Sequence[Chunk]:
        return self.chunks(place) if isinstance(place, str) else [Chunk(whole(self.spec_at(place)), place)]

    @property
    def files(self) -> set[Path]:
        return {part.piece.span.path for tensor in self.tensors.values() for part in tensor.parts}


def slices(
    name: str, stored: dcp_metadata.DcpTensor, depth: int, where: Path
) -> Iterator[tuple[tuple[int, ...], LogicalTensor]]:
    """The tensors that the first `depth` dimensions of a stored one count, each with its place in them. Raises
    CheckpointError for pieces that are cut in more than the first two of their own dimensions."""
    counts, spec = stored.shape[:depth], TensorSpec(stored.shape[depth:], stored.dtype)
    found: dict[tuple[int, ...], list[TensorPart]] = {at: [] for at in itertools.product(*map(range, counts))}
    for piece in stored.pieces:
        # Offsets and sizes per dimension, as a box of rows and columns: only the first two dimensions may be cut
        offsets, sizes = piece.offsets[depth:], piece.sizes[depth:]
        if sizes[2:] != spec.shape[2:]:
            what = f"`{name}` {list(stored.shape)} is cut in another dimension than the first two of a matrix: "
            what += f"it has a piece {list(piece.sizes)} at {list(piece.offsets)}"
            raise CheckpointError(what, where=where, do="Save it whole, or cut by rows.")
        inner = math.prod(spec.shape[2:])
        row, rows = (offsets[0], sizes[0]) if spec.shape else (0, 1)
        column, columns = (offsets[1] * inner, sizes[1] * inner) if len(spec.shape) > 1 else (0, 1)
        box = Box(row, rows, column, columns)
        ranges = zip(piece.offsets[:depth], piece.sizes[:depth], strict=True)
        for index, at in enumerate(itertools.product(*(range(start, start + size) for start, size in ranges))):
            found[at].append(TensorPart(box, piece, index * box.elements))
    for at, parts in found.items():
        yield at, LogicalTensor(spec, tuple(parts))


def flat_boxes(boxes: Sequence[Box], begin: int, end: int) -> Iterator[tuple[Box, int]]:
    """Elements `[begin, end)` of consecutive boxes, as boxes, each with its distance from `begin` in elements.

    Each box gives at most three: the end of a row, whole rows, the beginning of a row.
    """
    base = 0
    for box in boxes:
        at, last = max(begin - base, 0), min(end - base, box.elements)
        for cut in box.run(at, max(last - at, 0)):
            yield cut, base + at - begin
            at += cut.elements
        base += box.elements


def check_whole(name: str, tensor: LogicalTensor, where: Path) -> None:
    """Raise DamagedCheckpoint where the pieces of a tensor do not cover it exactly once."""
    boxes, spec = [part.box for part in tensor.parts], tensor.spec
    if _overlap(boxes) or sum(box.elements for box in boxes) != spec.rows * spec.columns:
        raise DamagedCheckpoint(f"the pieces of {name} do not make one tensor {list(spec.shape)}", where=where)


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether two boxes share an element.

    A sweep over the rows: `open_` has the column ranges of the boxes at the current row, which do not overlap, so a
    box that begins there can only overlap its neighbours.
    """
    events = []
    for box in boxes:
        if box.rows and box.columns:
            events += [(box.row, True, box.column, box.columns), (box.row + box.rows, False, box.column, box.columns)]
    open_: list[tuple[int, int]] = []
    for _, begins, column, columns in sorted(events):  # at the same row, ends come before beginnings
        at = bisect_left(open_, (column, columns))
        if not begins:
            del open_[at]
            continue
        before, after = open_[at - 1 : at], open_[at : at + 1]
        if (before and sum(before[0]) > column) or (after and after[0][0] < column + columns):
            return True
        open_.insert(at, (column, columns))
    return False
