"""The rows that each rank takes, and their batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

from precisionctl.errors import DataError
from precisionctl.model.model_shape import ModelShape
from precisionctl.recipe import Train
from precisionctl.torch_when_used import torch
from precisionctl.trainer.data.batch import Batch
from precisionctl.trainer.data.blend import Blend
from precisionctl.trainer.data.rows import Rows
from precisionctl.trainer.measure.flops import training_flops

if TYPE_CHECKING:
    from precisionctl.trainer.parallel.world import World


def share_of(rows: Sequence[int], rank: int, ranks: int) -> Sequence[int]:
    """The rows of an update that a rank takes: a contiguous block, in the order of ranks.

    So the position is the same number on all ranks, and a run continues with the same updates on another number of
    ranks. Raises DataError for rows that cannot be divided evenly.
    """
    each, rest = divmod(len(rows), ranks)
    if rest:
        raise DataError(
            f"{len(rows)} rows of an update cannot be divided evenly among {ranks} ranks",
            do="Choose a train.batch_size that the number of ranks divides.",
        )
    return rows[rank * each : (rank + 1) * each]


class Feed:
    """The micro-batches of a recipe's training, in order, on one rank of a world."""

    def __init__(self, rows: Rows | Blend, train: Train, device: torch.device, world: World) -> None:
        self.rows, self._train, self._device, self._world = rows, train, device, world
        self._order = rows.order(train.seed)

    def batches(self, position: int) -> list[Batch]:
        """This rank's micro-batches of the update whose rows begin at `position`."""
        rows = self._order.take(position, self._train.batch_size)
        mine, size = share_of(rows, self._world.data_rank, self._world.data_count), self._train.micro_batch_size
        return [self.rows.batch(mine[start : start + size]).to(self._device) for start in range(0, len(mine), size)]

    def update(self, position: int, model: ModelShape) -> tuple[list[Batch], int, float]:
        """This rank's micro-batches of the update whose rows begin at `position`; and of all ranks together, in that
        update, the number of targets and the FLOPs of the `model`."""
        batches = self.batches(position)
        flops = training_flops(model, [length for batch in batches for length in batch.lengths])
        mine = torch.tensor([sum(batch.targets for batch in batches), flops], dtype=torch.float64)
        targets, flops_of_all = self._world.sum_over_data_ranks(mine).tolist()
        return batches, int(targets), flops_of_all

    def upcoming(self, position: int) -> Iterator[tuple[Batch, int]]:
        """This rank's micro-batches of that update and all later ones, each with the number of targets that all ranks
        together have in its update."""
        for start in count(position, self._train.batch_size):
            batches = self.batches(start)
            mine = torch.tensor(sum(batch.targets for batch in batches))
            targets = int(self._world.sum_over_data_ranks(mine))
            yield from ((batch, targets) for batch in batches)
