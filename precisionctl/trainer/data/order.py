"""In which order rows are taken, and which of them each rank takes. One number says where a run stands."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from precisionctl.errors import DataError

Taken = TypeVar("Taken")


class Order:
    """The endless order of rows: each epoch is a permutation of its own, made from `seed` and the epoch."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows = rows
        self._seed = seed
        self._epoch = -1
        self._permutation: NDArray[np.int64] = np.empty(0, np.int64)

    def take(self, position: int, count: int) -> list[int]:
        """Row numbers `[position, position + count)` of the order. `position` alone says where a run stands."""
        return [self.row(place) for place in range(position, position + count)]

    def row(self, place: int) -> int:
        epoch, index = divmod(place, self._rows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._permutation = torch.randperm(self._rows, generator=generator).numpy()
            self._epoch = epoch
        return int(self._permutation[index])


def share_of(rows: Sequence[Taken], rank: int, ranks: int) -> Sequence[Taken]:
    """What a rank takes of the rows of an update: its block, so that the ranks in turn have them all in their order.

    Where a run stands is then the same number on each rank, and another number of ranks goes on from it with the same
    updates. Raises DataError for rows that cannot be dealt out evenly.
    """
    each, rest = divmod(len(rows), ranks)
    if rest:
        raise DataError(
            f"{len(rows)} rows of an update cannot be dealt out to {ranks} ranks evenly",
            do="Choose a train.batch_size that the number of ranks divides.",
        )
    return rows[rank * each : (rank + 1) * each]
