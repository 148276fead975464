"""Several data sets blended by weights: rows of each come exactly as often as its weight says, evenly spread."""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from math import gcd, lcm
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from precisionctl.recipe import Data
from precisionctl.tokens.tokenizer import Tokenizer
from precisionctl.trainer.data.batch import Batch, make_batch
from precisionctl.trainer.data.feed import Order
from precisionctl.trainer.data.rows import Rows, load_rows
from precisionctl.trainer.data.store import OnTokens

LONGEST_PERIOD = 1_000_000
"""Most rows until the order of the data sets repeats. Weights that would need more are rounded."""


@dataclass(frozen=True)
class Blend:
    """Data sets concatenated to one: their rows are numbered consecutively. `weights`, above 0, are relative numbers of
    rows, of any sum."""

    parts: Sequence[Rows]
    weights: Sequence[float]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def has_equal_rows(self) -> bool:
        """As `Rows.has_equal_rows`: a recipe has one length for all of them."""
        return all(part.has_equal_rows for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """A hash of the data that is trained on, and of how often."""
        lines = [f"{turns} {part.fingerprint}" for turns, part in zip(turns_of(self.weights), self.parts, strict=True)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for part in self.parts for note in part.notes))

    def require_vocabulary(self, size: int) -> None:
        """Raise DataError for a token that a model with `size` of them does not know."""
        for part in self.parts:
            part.require_vocabulary(size)

    def shared_by(self, ranks: int) -> "Blend":
        return replace(self, parts=[part.shared_by(ranks) for part in self.parts])

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The rows of these numbers, padded at the right."""
        first = [0, *accumulate(map(len, self.parts))]
        owners = [bisect_right(first, number) - 1 for number in numbers]
        rows = [self.parts[part].pieces(number - first[part]) for number, part in zip(numbers, owners, strict=True)]
        return make_batch(rows, self.parts[0].padding, self.parts[0].ranks)

    def order(self, seed: int) -> "BlendedOrder":
        return BlendedOrder([len(part) for part in self.parts], self.weights, seed)


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


def load_data(
    data: Data, tokenizer: Tokenizer, cache: Path | None, on_tokens: OnTokens = lambda count: None
) -> Rows | Blend:
    """The data of a recipe. Raises as `load_rows`."""

    def load(path: str) -> Rows:
        length, packing = data.sequence_length, data.packing
        return load_rows(Path(path), tokenizer, length, packing=packing, cache=cache, on_tokens=on_tokens)

    if not data.blend:
        return load(data.path)
    return Blend([load(share.path) for share in data.blend], [share.weight for share in data.blend])


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
