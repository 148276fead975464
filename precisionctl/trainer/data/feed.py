"""Rows in the order and the batches in which training takes them."""

from collections.abc import Iterable, Iterator
from itertools import count

import torch

from precisionctl.recipe import Train
from precisionctl.trainer.data.batch import Batch
from precisionctl.trainer.data.blend import Blend
from precisionctl.trainer.data.order import share_of
from precisionctl.trainer.data.rows import Rows


class Feed:
    """Rows in the order and the batches in which a recipe's training takes them, or one rank of several does."""

    def __init__(
        self, rows: Rows | Blend, train: Train, device: torch.device, *, rank: int = 0, ranks: int = 1
    ) -> None:
        self.rows, self._train, self._device = rows, train, device
        self._rank, self._ranks = rank, ranks
        self._order = rows.order(train.seed)

    def batches(self, position: int) -> list[Batch]:
        """The micro-batches of the update that takes its rows from `position` on."""
        numbers = share_of(self._order.take(position, self._train.batch_size), self._rank, self._ranks)
        return list(in_batches(self.rows, numbers, self._train.micro_batch_size, self._device))

    def upcoming(self, position: int) -> Iterator[tuple[Batch, int]]:
        """The micro-batches of that update and all later ones, each with the targets of its update."""
        for start in count(position, self._train.batch_size):
            batches = self.batches(start)
            targets = sum(batch.targets for batch in batches)
            yield from ((batch, targets) for batch in batches)


def in_batches(rows: Rows | Blend, numbers: Iterable[int], size: int, device: torch.device) -> Iterator[Batch]:
    """Rows of these numbers in batches of `size`, the last of which may be smaller, on a device."""
    listed = list(numbers)
    for start in range(0, len(listed), size):
        yield rows.batch(listed[start : start + size]).to(device)
