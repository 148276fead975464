"""The order in which rows are taken. A position in it is a single number."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from precisionctl.torch_when_used import torch

LONGEST_PERIOD = 1_000_000
"""Most rows until the order of the data sets repeats. Weights that would need more are rounded."""


class Order:
    """The endless order of rows: each epoch is a permutation that depends on `seed` and the epoch's number."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows = rows
        self._seed = seed
        self._epoch = -1
        self._permutation: NDArray[np.int64] = np.empty(0, np.int64)

    def take(self, position: int, count: int) -> list[int]:
        """Row numbers `[position, position + count)` of the order. The order depends on nothing but `position`."""
        return [self.row(place) for place in range(position, position + count)]

    def row(self, place: int) -> int:
        """The row number at one place of the order."""
        epoch, index = divmod(place, self._rows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._permutation = torch.randperm(self._rows, generator=generator).numpy()
            self._epoch = epoch
        return int(self._permutation[index])


class BlendedOrder:
    """The endless order of the rows of a blend. Within each data set it is `Order`, with the data set's own seed."""

    def __init__(self, rows: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self._turns = turns_of(weights)
        self._parts, self._places = one_period(self._turns)
        self._orders = [Order(count, seed + number) for number, count in enumerate(rows)]
        self._first = [0, *accumulate(rows)]

    def take(self, position: int, count: int) -> list[int]:
        """Row numbers `[position, position + count)` of the order. The order depends on nothing but `position`."""
        rows = []
        for place in range(position, position + count):
            period, index = divmod(place, len(self._parts))
            part = int(self._parts[index])
            row = self._orders[part].row(period * self._turns[part] + int(self._places[index]))
            rows.append(self._first[part] + row)
        return rows


def turns_of(weights: Sequence[float]) -> list[int]:
    """The number of rows of each data set in a period: the smallest integers in proportion to the weights as they are
    written or, if their sum exceeds LONGEST_PERIOD, rounded shares of it."""
    written = [Fraction(str(weight)) for weight in weights]
    common = lcm(*(weight.denominator for weight in written))
    whole = [int(weight * common) for weight in written]
    smallest = [turns // gcd(*whole) for turns in whole]
    if (total := sum(smallest)) <= LONGEST_PERIOD:
        return smallest
    return [max(1, round(Fraction(turns * LONGEST_PERIOD, total))) for turns in smallest]


def one_period(turns: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """For each row of a period, the number of its data set, and the number of earlier rows of that data set in it.

    Row `j` of a data set with `n` rows is due at `(j + 1/2) / n` of the period, and rows come when due: Webster's
    method of apportionment. A data set is never off its share by more than `1/2 + share * data sets / 2` rows, which is
    what Megatron's error diffusion is for (megatron/core/datasets/helpers.cpp, build_blending_indices).
    """
    parts = np.concatenate([np.full(count, part, np.int32) for part, count in enumerate(turns)])
    places = np.concatenate([np.arange(count) for count in turns])
    due = np.concatenate([(2 * np.arange(count) + 1) / (2 * count) for count in turns])
    order = np.argsort(due, kind="stable")
    return parts[order], places[order]
