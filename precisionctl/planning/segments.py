"""Lowering: turn a table row that only moves rows of tensors into a list of copies, without a second mapping.

The row's own `merge` or `split` is applied to row numbers instead of values. Each run of consecutive numbers in the
result is a segment: a number of rows to copy from one place to another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from precisionctl.architectures.param_map import MOST_ROWS, Row
from precisionctl.architectures.rearrangements import InOrder, Vocabulary
from precisionctl.errors import DamagedCheckpoint
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import Layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

RowNumbers: TypeAlias = "NDArray[np.int64]"


@dataclass(frozen=True)
class Segment:
    """Rows `[write_row, write_row + rows)` of the tensor `write` are copied from row `read_row` on of `read`, or are
    zeros if `read` is None."""

    read: str | None
    read_row: int
    write: str
    write_row: int
    rows: int


def keeps_tensors(row: Row, source: Layout, target: Layout) -> bool:
    """Whether nothing of a row's tensors changes but their names: neither the layout, nor how Megatron's is made of
    Hugging Face's."""
    return source == target and row.source.rearrangement == row.rearrangement


def lower(
    row: Row, model: ModelShape, source: Layout, target: Layout, reads: Mapping[str, int], writes: Sequence[str]
) -> list[Segment]:
    """The segments of a job whose row only moves, or keeps its tensors.

    `reads` has the number of rows of each tensor that is read; if it is empty, all of `writes` is zeros. Names in
    `writes` beyond the row's own are copies of its first tensor. `model` is the target's; between Megatron checkpoints
    its vocabulary may be padded to another number of rows. Raises DamagedCheckpoint for more rows to number than any
    model's tensor has.
    """
    written = [shape[0] if shape else 1 for shape in row.shapes(model, target)]
    copies = writes[len(written) :]
    merging, splitting = row.source.rearrangement, row.rearrangement
    if keeps_tensors(row, source, target) or (
        reads and isinstance(merging, Vocabulary) and isinstance(splitting, Vocabulary)
    ):
        # whole tensors: cut off, or padded with zeros, as the vocabulary is padded
        pairs = [
            *zip(reads, writes, written, strict=False),
            *((next(iter(reads)), copy, written[0]) for copy in copies),
        ]
        segments = []
        for read, write, rows in pairs:
            kept = min(reads[read], rows)
            segments.append(Segment(read, 0, write, 0, kept))
            if kept < rows:
                segments.append(Segment(None, 0, write, kept, rows - kept))
        return segments
    if not reads:
        return [Segment(None, 0, write, 0, rows) for write, rows in zip(writes, written, strict=True)]
    if isinstance(merging, InOrder) and isinstance(splitting, InOrder):
        # one after the other on both sides: not by row numbers, as a table of n-grams has hundreds of millions of rows
        whole_or_parts = dict(zip(writes, written, strict=False))
        return [
            *_in_order(reads, whole_or_parts),
            *(each for copy in copies for each in _in_order(reads, {copy: written[0]})),
        ]
    if sum(reads.values()) > MOST_ROWS:
        what = f"{sum(reads.values())} rows of `{next(iter(reads))}` and what goes with it"
        raise DamagedCheckpoint(what, do="No known model has as many. Is config.json this model's?")

    # any other way: the table's own merge and split, of row numbers
    numbers, starts = _number(reads.values())
    whole = numbers[0] if source == "megatron" else row.source.merge(numbers, model)
    outputs = (whole,) if target == "megatron" else row.split(whole, model)
    outputs += outputs[:1] * len(copies)
    return [
        segment
        for write, output in zip(writes, outputs, strict=False)
        for segment in _coalesce(output.flatten(), write, list(reads), starts)
    ]


def _in_order(reads: Mapping[str, int], writes: Mapping[str, int]) -> Iterator[Segment]:
    """The segments from tensors of these numbers of rows, one after the other, to others with as many in all."""
    begins, start = [], 0
    for read, rows in reads.items():
        begins.append((read, start, start + rows))
        start += rows
    at = 0
    for write, rows in writes.items():
        for read, begin, end in begins:
            first, last = max(begin, at), min(end, at + rows)
            if first < last:
                yield Segment(read, first - begin, write, first - at, last - first)
        at += rows


def _number(sizes: Iterable[int]) -> tuple[list[RowNumbers], list[int]]:
    """Number the rows of all parts consecutively, `[rows, 1]` each, with the first number of each part. 0 is for rows
    of zeros; one number is left out before each part, so that no run of numbers spans two parts, or zeros and a
    part."""
    numbers, starts, start = [], [], 2
    for rows in sizes:
        numbers.append(np.arange(start, start + rows)[:, None])
        starts.append(start)
        start += rows + 1
    return numbers, starts


def _coalesce(numbers: RowNumbers, write: str, reads: Sequence[str], starts: Sequence[int]) -> list[Segment]:
    """The segments of one written tensor: runs of consecutive row numbers, and runs of zeros."""
    step = np.diff(numbers)
    zeros = (numbers[1:] == 0) & (numbers[:-1] == 0)
    breaks = np.flatnonzero((step != 1) & ~zeros) + 1
    edges = [0, *breaks.tolist(), len(numbers)] if len(numbers) else []
    segments = []
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        first = int(numbers[begin])
        part = bisect_right(starts, first) - 1
        read, read_row = (reads[part], first - starts[part]) if first else (None, 0)
        segments.append(Segment(read, read_row, write, begin, end - begin))
    return segments
