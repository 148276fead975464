"""Chunks: which boxes of a logical tensor are where; reading, writing and checking rows of a tensor through them.

A `torch_dist` piece, a slice of a stacked tensor and a shard in a rank's file are all chunks, so everything that moves
data is arithmetic on boxes, written once, here and in `planning/segments.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from precisionctl.errors import CheckpointError, DamagedCheckpoint
from precisionctl.param import TensorSpec
from precisionctl.torch_when_used import torch
from precisionctl.untrusted.safe_files import whole_length

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    from precisionctl.codes.encoding import Encoding

Bytes: TypeAlias = "NDArray[np.uint8]"
"""Bytes in memory, `[rows, bytes of a row]`. Reading, moving, comparing and writing them needs no PyTorch."""

BytesProgress: TypeAlias = "Callable[[int], AbstractContextManager[Callable[[int], None]]]"
"""Opens a progress bar for a number of bytes, and yields a function to call with the number of further bytes done."""


@dataclass(frozen=True, slots=True)  # a large checkpoint has hundreds of thousands
class Box:
    """Rows `[row, row + rows)` and columns `[column, column + columns)` of a tensor seen as
    `[shape[0], product of the rest]`; of packed codes columns are bytes (`TensorSpec.width`)."""

    row: int
    rows: int
    column: int
    columns: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def intersect(self, other: Box) -> Box | None:
        """The part that is in both boxes; None where they do not overlap."""
        if self.row >= other.row + other.rows or other.row >= self.row + self.rows:
            return None  # at once, as of a tensor in thousands of chunks all others than a few do
        row, column = max(self.row, other.row), max(self.column, other.column)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        columns = min(self.column + self.columns, other.column + other.columns) - column
        return Box(row, rows, column, columns) if rows > 0 and columns > 0 else None

    def without(self, other: Box) -> list[Box]:
        """What is not in the other box, as boxes: above it, below it, and to its left and right."""
        both = self.intersect(other)
        if both is None:
            return [self]
        rest = []
        if above := both.row - self.row:
            rest.append(Box(self.row, above, self.column, self.columns))
        if below := self.row + self.rows - both.row - both.rows:
            rest.append(Box(both.row + both.rows, below, self.column, self.columns))
        if left := both.column - self.column:
            rest.append(Box(both.row, both.rows, self.column, left))
        if right := self.column + self.columns - both.column - both.columns:
            rest.append(Box(both.row, both.rows, both.column + both.columns, right))
        return rest

    def run(self, start: int, count: int) -> Iterator[Box]:
        """Elements `[start, start + count)` of the box, counted row by row, as boxes: where the run begins or ends in a
        row, that row is cut."""
        while count:
            row, column = divmod(start, self.columns)
            if column or count < self.columns:
                cut = Box(self.row + row, 1, self.column + column, min(count, self.columns - column))
            else:
                cut = Box(self.row + row, count // self.columns, self.column, self.columns)
            yield cut
            start, count = start + cut.elements, count - cut.elements


def cut_into_runs(boxes: Sequence[Box], runs: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, Box, int]]:
    """Runs of rows of a tensor that is in these boxes, put into another one: where a run begins there, its first row,
    and how many it has. Yields boxes of the other tensor, each with the number of the box that has its elements, and
    how many elements of that come before."""
    for row, first, rows in runs:
        for number, box in enumerate(boxes):
            begin, end = max(first, box.row), min(first + rows, box.row + box.rows)
            if begin < end:
                cut = Box(row + begin - first, end - begin, box.column, box.columns)
                yield number, cut, (begin - box.row) * box.columns


class Computed(Protocol):
    """The rows of a tensor that is stored nowhere: they are computed when they are read."""

    def rows(self, row: int, rows: int) -> Tensor:
        """Rows `[row, row + rows)` as `[rows, columns]`, in the tensor's dtype. Their bits do not depend on how many
        rows are asked for."""
        ...


class ComputedTensor(Computed, Protocol):
    """The same with the tensor's shape, of a tensor that is computed from the stored tensor `name` and has its
    dtype."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a logical tensor and where its row-major bytes are.

    `place` is a file, in which they start at byte `offset`, or a live tensor of the box's shape, or makes the rows of a
    whole tensor as they are read. `only` is the part of the box that this process reads or writes, if other ranks have
    the rest.
    """

    box: Box
    place: Path | Tensor | Computed
    offset: int = 0
    only: Box | None = None

    @property
    def part(self) -> Box:
        return self.only or self.box


class Chunked(Protocol):
    """The common part of a Reader and a Writer: tensors, and where their bytes are."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...
    def chunks(self, name: str) -> Sequence[Chunk]: ...


def chunk_files(place: Chunked, names: Iterable[str]) -> set[Path]:
    """The files that hold these tensors of a Reader, or will hold those of a Writer."""
    return {chunk.place for name in names for chunk in place.chunks(name) if isinstance(chunk.place, Path)}


def whole(spec: TensorSpec) -> Box:
    """The box that is all of a tensor."""
    return Box(0, spec.rows, 0, spec.width)


def shard_boxes(spec: TensorSpec, size: int) -> list[list[Box]]:
    """The boxes that each of `size` tensor-parallel ranks has of a tensor. A replicated tensor is only rank 0's.

    Of rows in several parts (gate and up), each rank has one box in each part. The plan has checked divisibility.
    """
    match spec.parallel.kind:
        case "replicated":
            return [[whole(spec)]] + [[] for _ in range(size - 1)]
        case "rows":
            parts = spec.parallel.rows_of_parts(spec.rows)
            starts = [0, *accumulate(parts)]
            return [
                [
                    Box(start + rank * (rows // size), rows // size, 0, spec.columns)
                    for start, rows in zip(starts, parts, strict=False)
                ]
                for rank in range(size)
            ]
        case "columns":
            step = spec.columns // size
            return [[Box(0, spec.rows, rank * step, step)] for rank in range(size)]


def read_tensor(source: Chunked, name: str) -> Tensor:
    """A whole tensor as stored: its shape, its dtype; packed codes as the bytes `[rows, width]`."""
    spec = source.specs[name]
    rows = read_rows(source, name, 0, spec.rows)
    return rows if spec.packing else rows.reshape(spec.shape)


def read_rows(source: Chunked, name: str, row: int, rows: int, out: Tensor | None = None) -> Tensor:
    """Rows `[row, row + rows)` as `[rows, width]` in the stored dtype; into `out` where one is given."""
    return read_box(source, name, Box(row, rows, 0, source.specs[name].width), out)


def read_values(
    source: Chunked, encodings: Mapping[str, Encoding], name: str, row: int = 0, rows: int | None = None
) -> Tensor:
    """Rows `[row, row + rows)`, or all, as values `[rows, columns]`: FP32 where `encodings` says how codes are decoded,
    else in the stored dtype."""
    stored = read_rows(source, name, row, source.specs[name].rows if rows is None else rows)
    return encodings[name].decode_rows(stored, row) if name in encodings else stored


def read_box(source: Chunked, name: str, box: Box, out: Tensor | None = None) -> Tensor:
    """A part of a tensor, `[box.rows, box.columns]`, as `read_rows`. Raises DamagedCheckpoint where chunks do not cover
    it; of a live model, what other ranks have of it is zeros."""
    if out is None:
        out = torch.empty(box.rows, box.columns, dtype=source.specs[name].dtype.torch)
    if out.numel():
        _read_box(source, name, box, out.view(torch.uint8).numpy())
    return out


def read_bytes(source: Chunked, name: str, row: int, rows: int, into: Bytes | None = None) -> Bytes:
    """As `read_rows`, but the rows' bytes `[rows, width * itemsize]`; into `into` if given."""
    spec = source.specs[name]
    if into is None:
        into = np.empty((rows, spec.width * spec.dtype.itemsize), np.uint8)
    _read_box(source, name, Box(row, rows, 0, spec.width), into)
    return into


def _read_box(source: Chunked, name: str, box: Box, into: Bytes) -> None:
    dtype, found = source.specs[name].dtype, list(_touching(source, name, box))
    for lacking in _uncovered(box, [part for _, part in found]):
        if not any(isinstance(chunk.place, torch.Tensor) for chunk, _ in found):
            raise DamagedCheckpoint(
                f"`{name}` is not whole: no file has row {lacking.row} from column {lacking.column} on",
                where=next((chunk.place for chunk, _ in found if isinstance(chunk.place, Path)), ""),
                do="Copy the checkpoint again.",
            )
        _window(into, lacking, box, dtype.itemsize)[:] = 0  # of a live model: other ranks have it, and write it
    for chunk, part in found:
        window = _window(into, part, box, dtype.itemsize)
        if isinstance(chunk.place, Path):
            _read(chunk, part, window)
        else:
            torch.from_numpy(window).view(dtype.torch).copy_(_held(chunk, part))


def _uncovered(box: Box, parts: Sequence[Box]) -> Sequence[Box]:
    """What none of the parts of a box covers. Their elements are not just counted, as replicas overlap."""
    if len(parts) == 1 and parts[0] == box:
        return ()
    left = [box] if box.elements else []
    for part in sorted(parts, key=lambda part: (part.row, part.column)):  # in this order few boxes are left at a time
        left = [rest for each in left for rest in each.without(part)]
    return left


def in_pieces(row: int, rows: int, width: int, room: int) -> Iterator[tuple[int, int]]:
    """Cut rows `[row, row + rows)` of `width` each into runs of at most `room`, but of at least one row: the first row
    of each run and its number of rows. `width` and `room` are both in elements, or both in bytes."""
    step = max(1, room // max(1, width))
    for first in range(row, row + rows, step):
        yield first, min(step, row + rows - first)


def rows_held(place: Chunked, name: str) -> list[range]:
    """The ranges of rows that this process has of a tensor: one range of all rows, unless other ranks have the rest."""
    runs: list[range] = []
    parts = [chunk.part for chunk in place.chunks(name)]
    for start, stop in sorted((part.row, part.row + part.rows) for part in parts):
        if runs and start <= runs[-1].stop:
            runs[-1] = range(runs[-1].start, max(stop, runs[-1].stop))
        else:
            runs.append(range(start, stop))
    return runs


def _read(chunk: Chunk, part: Box, into: Bytes) -> None:
    window = into if into.flags.c_contiguous else np.empty(into.shape, np.uint8)
    try:
        _transfer(chunk, part, window, write=False)
    except OSError as error:
        raise CheckpointError(
            f"not readable: {error.strerror}",
            where=chunk.place,
            do="Is its disk failing? What is done is kept; copy the file again and run the same command.",
        ) from error
    if window is not into:
        into[:] = window


def write_rows(target: Chunked, name: str, row: int, values: Tensor | Bytes) -> None:
    """Write `[rows, width]` values, of the target's dtype, at row `row`; or their bytes, `[rows, width * itemsize]`."""
    for chunk, part, window in _windows(target, name, row, values):
        if isinstance(chunk.place, Path):
            _transfer(chunk, part, np.ascontiguousarray(window), write=True)
        else:
            _held(chunk, part).copy_(torch.from_numpy(window).view(target.specs[name].dtype.torch))


def check_rows(target: Chunked, name: str, row: int, values: Tensor | Bytes) -> None:
    """Raise DamagedCheckpoint unless `target` holds these values, from row `row` on, bit for bit; as `write_rows`."""
    for chunk, part, window in _windows(target, name, row, values):
        found = np.empty(window.shape, np.uint8)
        _read(chunk, part, found)
        if not np.array_equal(window, found):
            raise DamagedCheckpoint(
                f"`{name}` reads back other than it was written",
                where=chunk.place,
                do="Is the disk or the memory failing? Run with --restart.",
            )


def _windows(target: Chunked, name: str, row: int, values: Tensor | Bytes) -> Iterator[tuple[Chunk, Box, Bytes]]:
    """Yield each chunk that holds some of these rows, the part of the chunk, and the bytes of `values` that belong
    there."""
    if 0 in values.shape:
        return
    spec = target.specs[name]
    if isinstance(values, np.ndarray):
        data = values
    else:
        assert values.dtype == spec.dtype.torch, f"{values.dtype} for `{name}`, which is {spec.dtype}"
        data = bytes_of(values.reshape(-1, spec.width))
    assert data.shape[1] == spec.width * spec.dtype.itemsize, f"rows of `{name}` have other sizes"
    box = Box(row, len(data), 0, spec.width)
    for chunk, part in _touching(target, name, box):
        yield chunk, part, _window(data, part, box, spec.dtype.itemsize)


def _touching(place: Chunked, name: str, box: Box) -> Iterator[tuple[Chunk, Box]]:
    """The chunks that have elements of a box, each with the part that it has."""
    for chunk in place.chunks(name):
        part = chunk.part.intersect(box)
        if part is not None:
            yield chunk, part


def bytes_of(values: Tensor) -> Bytes:
    """The memory of a tensor `[rows, columns]` on a CPU, or of a contiguous copy."""
    values = values.detach().contiguous()
    if values.stride(-1) != 1:  # a single column, which counts as contiguous, and which PyTorch has no bytes of
        values = values.clone(memory_format=torch.contiguous_format)
    return values.view(torch.uint8).numpy()


def _window(data: Bytes, part: Box, of: Box, itemsize: int) -> Bytes:
    """`part` of the bytes of a box."""
    column = (part.column - of.column) * itemsize
    return data[part.row - of.row : part.row - of.row + part.rows, column : column + part.columns * itemsize]


def _held(chunk: Chunk, part: Box) -> Tensor:
    """`part` of a chunk that is not in a file: a view of a live tensor, or rows that are computed now."""
    if not isinstance(chunk.place, torch.Tensor):
        assert not isinstance(chunk.place, Path)
        return chunk.place.rows(part.row, part.rows)[:, part.column : part.column + part.columns]
    live = chunk.place.detach()
    row, column = part.row - chunk.box.row, part.column - chunk.box.column
    flat = live.view(live.shape[0] if live.dim() else 1, -1)
    return flat[row : row + part.rows, column : column + part.columns]


_WRITTEN_AT_ONCE = 1 << 20
"""Bytes in one call that writes. Linux takes memory for its cache in blocks of up to that size, and larger ones are
faster: 2.4 GB took 2.1 s, by 128 KB 2.4 s. But blocks of 2 MB or more are what a virtual machine gives back to its host
while they are free: where much was free, 2.4 GB took 1.8 s, by 4 MB 3.6 s."""


def _transfer(chunk: Chunk, part: Box, window: Bytes, *, write: bool) -> None:
    """Write `part` of a file's chunk, or read it into `window`, which is contiguous. At once if it is contiguous in the
    file, too, else row by row."""
    itemsize = window.shape[1] // part.columns
    pitch = chunk.box.columns * itemsize
    offset = chunk.offset + (part.row - chunk.box.row) * pitch + (part.column - chunk.box.column) * itemsize
    runs = [window] if part.columns == chunk.box.columns else list(window)
    file = os.open(chunk.place, os.O_WRONLY if write else os.O_RDONLY)  # type: ignore[arg-type]
    try:
        for index, run in enumerate(runs):
            data, at = run.data.cast("B"), offset + index * pitch
            while data:  # a call may transfer less than it is asked for
                done = os.pwrite(file, data[:_WRITTEN_AT_ONCE], at) if write else os.preadv(file, [data], at)
                if done == 0:
                    if whole_length(chunk.place):  # type: ignore[arg-type]
                        what = "its values are needed, and only the header of this file was downloaded"
                        do = "Give the name on the Hub, not this path; `inspect --fp8` downloads all of it."
                        raise CheckpointError(what, where=chunk.place, do=do)
                    what = "a file ends before its tensors do"
                    raise DamagedCheckpoint(what, where=chunk.place, do="Is the copy whole?")
                data, at = data[done:], at + done
    finally:
        os.close(file)
