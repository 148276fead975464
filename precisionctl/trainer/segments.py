"""Texts that share rows of a batch: how long each is, and so which tokens may see one another."""

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from precisionctl.trainer.transfers import sent


@dataclass(frozen=True)
class Segments:
    """The lengths of all texts in a batch `[rows, length]`, in the order of its flattened tokens, the padding behind a
    row's last text being texts of its own: they add up to rows * length, and none goes beyond its row."""

    lengths: tuple[int, ...]
    _ends: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """Where each begins among the flattened tokens, and where the last ends: int32 `[texts + 1]`, as FlashAttention
        and Transformer Engine want it; sent there once for all layers."""
        if device not in self._ends:
            self._ends[device] = sent(torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32), device)
        return self._ends[device]

    def sizes(self, device: torch.device) -> Tensor:
        """The length of each flattened token's own text, int64 `[rows * length]`."""
        lengths = torch.tensor(self.lengths)
        return sent(lengths.repeat_interleave(lengths), device)

    def places(self, device: torch.device) -> Tensor:
        """The place of each flattened token in its own text, int64 `[rows * length]`."""
        return sent(torch.cat([torch.arange(length) for length in self.lengths]), device)
