"""Texts that share the rows of a batch, and what attention needs to know of where tokens are."""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from precisionctl.trainer.transfers import to_device


@dataclass(frozen=True)
class PackedSequences:
    """The lengths of all texts in a batch `[rows, length]` whose rows are shared by texts, in the order of its
    flattened tokens. Padding behind a row's last text counts as texts of its own, so they add up to rows * length, and
    none goes beyond its row."""

    lengths: tuple[int, ...]
    _ends: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def in_chunks(self, size: int) -> "PackedSequences":
        """The same tokens, each text cut into pieces of this many."""
        pieces = (min(size, length - begin) for length in self.lengths for begin in range(0, length, size))
        return PackedSequences(tuple(pieces))

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """Where each text begins among the flattened tokens, and where the last ends: int32 `[texts + 1]`, as
        FlashAttention and Transformer Engine take it; copied to the device once for all layers."""
        if device not in self._ends:
            self._ends[device] = to_device(torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32), device)
        return self._ends[device]

    def lengths_by_token(self, device: torch.device) -> Tensor:
        """The length of each flattened token's own text, int64 `[rows * length]`."""
        lengths = torch.tensor(self.lengths)
        return to_device(lengths.repeat_interleave(lengths), device)

    def positions(self, device: torch.device) -> Tensor:
        """The position of each flattened token in its own text, int64 `[rows * length]`."""
        return to_device(torch.cat([torch.arange(length) for length in self.lengths]), device)


class Positions(NamedTuple):
    """What attention needs to know about the positions of S tokens."""

    cos: Tensor | None
    """FP32 `[S, P]`, or `[B, S, P]` where rows differ, as `sin`: one angle for each of the P pairs that are rotated.
    None where positions are learned."""
    sin: Tensor | None
    window: int | None
    """How many keys a query sees, itself and those before it; None for all."""
    packed: PackedSequences | None
    """Texts that share the batch's rows: a query sees keys of its own text alone."""
    shape: tuple[int, int]
    """B and S."""
    query_scale: Tensor | None = None
    """FP32 `[S]` or `[B, S]`: what queries are multiplied by, or, where heads have numbers of their own for it, the
    logarithm that these belong to. None for 1."""
    tokens: Tensor | None = None
    """int64 `[B * S]`, for routers that look experts up by token, and for n-grams; None without these."""
