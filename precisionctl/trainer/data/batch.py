"""What a step of training is given: tokens and labels, padded, and where one text of a row ends and the next begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precisionctl.fp8.numerics import MX_BLOCK
from precisionctl.trainer.segments import Segments
from precisionctl.trainer.transfers import sent

IGNORED = -100
"""The label of a position that is no target: torch's default `ignore_index`."""


class Piece(NamedTuple):
    """A text or a part of one: its token ids, of any integer type, and whether each is to be learned, bool; both
    `[tokens]`. None learns all."""

    tokens: NDArray[np.integer[Any]]
    learned: NDArray[np.bool_] | None

    @property
    def positions(self) -> int:
        """How many tokens have one to follow them."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Batch:
    """`tokens` and `labels`, int64 `[rows, length]`: `labels[r, i]` follows `tokens[r, i]`, or is IGNORED.
    `real`, bool, is False at padding. `segments` where several texts share a row. What is counted is counted in
    memory, so that a device need not be asked: `origin` is the batch there, of one on a device."""

    tokens: Tensor
    labels: Tensor
    real: Tensor
    segments: Segments | None = None
    origin: "Batch | None" = None

    @property
    def targets(self) -> int:
        """How many positions count towards the loss."""
        return int(((self.origin or self).labels != IGNORED).sum())

    @property
    def padded(self) -> bool:
        return not bool((self.origin or self).real.all())

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text, without padding."""
        real = (self.origin or self).real
        if self.segments is None:
            return [int(length) for length in real.sum(1)]
        texts = torch.split(real.flatten(), list(self.segments.lengths))
        return [len(text) for text in texts if bool(text[0])]

    def to(self, device: torch.device) -> "Batch":
        tokens, labels, real = (sent(tensor, device) for tensor in (self.tokens, self.labels, self.real))
        return Batch(tokens, labels, real, self.segments, self)


def make_batch(rows: Sequence[Sequence[Piece]], padding: int, ranks: int = 1) -> Batch:
    """Rows of pieces, padded at the right to the longest, rounded up to what FP8 GEMMs take under any recipe, on each
    of `ranks` that share the tokens."""
    filled = max(sum(piece.positions for piece in row) for row in rows)
    multiple = MX_BLOCK * ranks
    width = -(-filled // multiple) * multiple
    longest = max(piece.positions for row in rows for piece in row)
    tokens = torch.full((len(rows), width), padding)
    labels = torch.full((len(rows), width), IGNORED)
    real = torch.zeros((len(rows), width), dtype=torch.bool)
    lengths: list[int] = []
    for row, pieces in enumerate(rows):
        place = 0
        for piece in pieces:
            ids = torch.from_numpy(piece.tokens.astype(np.int64))
            here = slice(place, place + piece.positions)
            tokens[row, here] = ids[:-1]
            labels[row, here] = ids[1:] if piece.learned is None else _only(ids[1:], piece.learned[1:])
            lengths.append(piece.positions)
            place += piece.positions
        real[row, :place] = True
        # no longer than the texts: the longest one decides what attention costs
        lengths += [min(longest, width - start) for start in range(place, width, longest)]
    shared = any(len(pieces) > 1 for pieces in rows)
    return Batch(tokens, labels, real, Segments(tuple(lengths)) if shared else None)


def _only(labels: Tensor, learned: NDArray[np.bool_]) -> Tensor:
    return labels.where(torch.from_numpy(learned.copy()), IGNORED)
