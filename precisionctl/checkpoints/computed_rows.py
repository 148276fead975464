"""Tensors of a checkpoint in another form than it stores them, as rows that are computed when they are read: a matrix
turned, some of its rows, also in another order, a vector as a matrix, or heads of queries, keys or values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precisionctl.architectures.rearrangements import pairs_exchanged
from precisionctl.checkpoints.chunks import Box, Chunked, read_box, read_rows, whole
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True)
class TransposedRows:
    """The transpose of a stored matrix, or of a box of it, as rows that are computed."""

    stored: Chunked
    name: str
    box: Box | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._box.columns, self._box.rows

    @property
    def _box(self) -> Box:
        return self.box or whole(self.stored.specs[self.name])

    def rows(self, row: int, rows: int) -> Tensor:
        box = self._box
        return read_box(self.stored, self.name, Box(box.row, box.rows, box.column + row, rows)).t().contiguous()


@dataclass(frozen=True)
class SomeRows:
    """The rows `[first, first + count)` of the stored tensor `name`."""

    stored: Chunked
    name: str
    first: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, *self.stored.specs[self.name].shape[1:])

    def rows(self, row: int, rows: int) -> Tensor:
        """Rows `[row, row + rows)` of these."""
        return read_rows(self.stored, self.name, self.first + row, rows)


@dataclass(frozen=True)
class PickedRows:
    """Rows of the stored tensor `name`, by their numbers, in this `order`."""

    stored: Chunked
    name: str
    order: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.order), *self.stored.specs[self.name].shape[1:])

    def rows(self, row: int, rows: int) -> Tensor:
        """Rows `[row, row + rows)` of these."""
        order = self.order[row : row + rows]
        first, last = int(order.min()), int(order.max())
        return read_rows(self.stored, self.name, first, last - first + 1)[torch.from_numpy(order - first)]


@dataclass(frozen=True)
class FoldedRows:
    """A matrix with this many columns, whose rows follow each other in the stored vector `name`."""

    stored: Chunked
    name: str
    columns: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.specs[self.name].rows // self.columns, self.columns

    def rows(self, row: int, rows: int) -> Tensor:
        """Rows `[row, row + rows)` as `[rows, columns]`."""
        vector = read_rows(self.stored, self.name, row * self.columns, rows * self.columns)
        return vector.reshape(rows, self.columns)


@dataclass(frozen=True)
class Heads:
    """Rows of queries, keys or values: those of each head follow each other in the stored tensor `name`, from row
    `starts[head]` on. With `pairs` the rows of a head are rotary pairs."""

    stored: Chunked
    name: str
    starts: Sequence[int]
    size: int
    pairs: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.starts) * self.size, *self.stored.specs[self.name].shape[1:])

    def rows(self, row: int, rows: int) -> Tensor:
        """Rows `[row, row + rows)` as `[rows, columns]`, as Hugging Face has them."""
        size, first = self.size, row // self.size
        starts = self.starts[first : -(-(row + rows) // size)]
        heads = torch.stack([read_rows(self.stored, self.name, start, size) for start in starts])
        if self.pairs:
            heads = pairs_exchanged(heads, as_neighbours=False)
        return heads.reshape(len(starts) * size, -1)[row - first * size :][:rows]
