"""Heads of queries, keys or values whose rows a checkpoint has in another order than Hugging Face: computed rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precisionctl.architectures.rearrangements import pairs_exchanged
from precisionctl.checkpoints.chunks import Chunked, read_rows
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor


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
