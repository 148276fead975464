"""Lowering: a row that only moves rows becomes copies, with no second mapping.

The row's own `merge` or `split` is run on row numbers instead of values, and what comes out is
coalesced into segments: so many rows, from here in one tensor to there in another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from precisionctl.architectures.param_map import Row
from precisionctl.model_shape import ModelShape
from precisionctl.param import Layout


@dataclass(frozen=True)
class Segment:
    """`rows` rows of `write` from row `write_row` on: those of `read` from `read_row` on, or zeros (None)."""

    read: str | None
    read_row: int
    write: str
    write_row: int
    rows: int


def lower(
    row: Row, model: ModelShape, source: Layout, target: Layout, reads: Sequence[str], writes: Sequence[str]
) -> list[Segment]:
    """The segments of a row's job. `reads` empty means that all of `writes` is zeros."""
    sizes = _rows(row, model, source)
    if source == target:
        pairs = zip(reads, writes, sizes, strict=True)
        return [Segment(read, 0, write, 0, rows) for read, write, rows in pairs]
    if not reads:
        return [Segment(None, 0, write, 0, rows) for write, rows in zip(writes, _rows(row, model, target), strict=True)]
    numbers, starts = _number(sizes)
    outputs = (row.merge(numbers, model),) if target == "megatron" else row.split(numbers[0], model)
    return [
        segment
        for write, output in zip(writes, outputs, strict=False)
        for segment in _coalesce(output.flatten(), write, reads, starts)
    ]


def layout_parts(row: Row, model: ModelShape) -> list[int]:
    """Rows of each Hugging Face tensor of a row."""
    whole = torch.empty(row.shape(model)[0], 1, device="meta")  # a config may claim any number of rows
    return [part.shape[0] for part in row.split(whole, model)]


def _rows(row: Row, model: ModelShape, layout: Layout) -> list[int]:
    return [row.shape(model)[0]] if layout == "megatron" else layout_parts(row, model)


def _number(sizes: Sequence[int]) -> tuple[list[Tensor], list[int]]:
    """Numbers `[rows, 1]` for each part's rows. 0 is left for rows of zeros, and a gap between parts."""
    numbers, starts, start = [], [], 1
    for rows in sizes:
        numbers.append(torch.arange(start, start + rows).unsqueeze(1))
        starts.append(start)
        start += rows + 1
    return numbers, starts


def _coalesce(numbers: Tensor, write: str, reads: Sequence[str], starts: Sequence[int]) -> list[Segment]:
    step = numbers.diff()
    zeros = (numbers[1:] == 0) & (numbers[:-1] == 0)
    breaks = torch.nonzero((step != 1) & ~zeros).flatten() + 1
    edges = [0, *breaks.tolist(), len(numbers)]
    segments = []
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        first = int(numbers[begin])
        part = sum(start <= first for start in starts) - 1
        read, read_row = (reads[part], first - starts[part]) if first else (None, 0)
        segments.append(Segment(read, read_row, write, begin, end - begin))
    return segments
