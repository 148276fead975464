"""Batches: tokens, labels, a padding mask and, with packing, where the sequences in a row begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from precisionctl.codes.numerics import MX_BLOCK
from precisionctl.torch_when_used import torch
from precisionctl.trainer.transfers import to_device

if TYPE_CHECKING:
    from torch import Tensor

    from precisionctl.trainer.sequences import PackedSequences

IGNORED = -100
"""The label of a position that is not a target: torch's default `ignore_index`."""


class Piece(NamedTuple):
    """A text or a part of one: token ids of any integer type and, bool, whether each is to be learned; both `[tokens]`.
    With None all are learned."""

    tokens: NDArray[np.integer[Any]]
    learned: NDArray[np.bool_] | None

    @property
    def positions(self) -> int:
        """The number of tokens that have a next token."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Batch:
    """A micro-batch. `tokens` and `labels` are int64 `[rows, length]`; `labels[r, i]` is the token that follows
    `tokens[r, i]`, or IGNORED. `padding_mask`, bool of that shape, is False at padding. `packed` is set if several
    texts share a row. `on_host` is the batch in CPU memory that one on a device was copied from: counting there does
    not wait for the device."""

    tokens: Tensor
    labels: Tensor
    padding_mask: Tensor
    packed: PackedSequences | None = None
    on_host: Batch | None = None

    @property
    def targets(self) -> int:
        """The number of positions that count towards the loss."""
        return int(((self.on_host or self).labels != IGNORED).sum())

    @property
    def padded(self) -> bool:
        return not bool((self.on_host or self).padding_mask.all())

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each text, without padding."""
        mask = (self.on_host or self).padding_mask
        if self.packed is None:
            return [int(length) for length in mask.sum(1)]
        texts = torch.split(mask.flatten(), list(self.packed.lengths))
        return [len(text) for text in texts if bool(text[0])]

    def to(self, device: torch.device) -> Batch:
        tokens, labels, mask = (to_device(tensor, device) for tensor in (self.tokens, self.labels, self.padding_mask))
        return Batch(tokens, labels, mask, self.packed, self)


def make_batch(rows: Sequence[Sequence[Piece]], padding: int, ranks: int) -> Batch:
    """A batch of rows of pieces, padded at the right with the token `padding` to the longest row, rounded up so that
    each of `ranks` ranks that divide the tokens gets a multiple of MX_BLOCK, as FP8 GEMMs need under any scaling."""
    from precisionctl.trainer.sequences import PackedSequences  # takes PyTorch with it

    filled = max(sum(piece.positions for piece in row) for row in rows)
    multiple = MX_BLOCK * ranks
    width = -(-filled // multiple) * multiple
    longest = max(piece.positions for row in rows for piece in row)
    tokens = torch.full((len(rows), width), padding)
    labels = torch.full((len(rows), width), IGNORED)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    lengths: list[int] = []
    for row, pieces in enumerate(rows):
        start = 0
        for piece in pieces:
            ids = torch.from_numpy(piece.tokens.astype(np.int64))
            here = slice(start, start + piece.positions)
            tokens[row, here] = ids[:-1]
            labels[row, here] = ids[1:]
            if piece.learned is not None:
                labels[row, here] = ids[1:].where(torch.from_numpy(piece.learned[1:].copy()), IGNORED)
            lengths.append(piece.positions)
            start += piece.positions
        mask[row, :start] = True
        # Padding in sequences no longer than the longest text, as the longest sequence decides what attention costs
        lengths += [min(longest, width - begin) for begin in range(start, width, longest)]
    shared = any(len(pieces) > 1 for pieces in rows)
    return Batch(tokens, labels, mask, PackedSequences(tuple(lengths)) if shared else None)
