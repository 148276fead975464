"""Factors of rows: fixed numbers that a format has in its weights, and config.json beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precisionctl.codes.elements import Cast
from precisionctl.errors import DamagedCheckpoint

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RowFactors:
    """Numbers that rows of a tensor are multiplied by in FP32, one after the other: those of each run of so many rows.
    Those of the last run are of all rows behind it too."""

    runs: tuple[tuple[int, tuple[float, ...]], ...]

    @property
    def are_ones(self) -> bool:
        return all(factor == 1 for _, factors in self.runs for factor in factors)

    @property
    def rows_together(self) -> int:
        """How many rows are one tensor, where these have several factors; else 1."""
        return sum(rows for rows, _ in self.runs) if len(self.runs) > 1 else 1

    def multiplied(self, values: Tensor, row: int) -> Tensor:
        """FP32 products of rows `[n, columns]` from `row` on."""
        made = values.float().clone()
        for part, factors in self._parts(made, row):
            for factor in factors:
                part *= factor
        return made

    def divided(self, products: Tensor, row: int) -> Tensor:
        """FP32 values of such products. Raises DamagedCheckpoint for products with 0."""
        made = products.float().clone()
        for part, factors in self._parts(made, row):
            for factor in reversed(factors):
                if factor == 0:
                    raise DamagedCheckpoint("a multiplier of weights is 0, and no weights follow from products")
                part /= factor
        return made

    def _parts(self, values: Tensor, row: int) -> Iterator[tuple[Tensor, tuple[float, ...]]]:
        first = -row
        for number, (rows, factors) in enumerate(self.runs, 1):
            stop = first + rows if number < len(self.runs) else len(values)
            yield values[max(first, 0) : max(stop, 0)], factors
            first = stop


@dataclass(frozen=True)
class RoundedProducts(Cast):
    """What values are read as of their products with `factors`, which are cast."""

    factors: RowFactors
    cast: Cast

    @property
    def rows_together(self) -> int:  # type: ignore[override]
        return self.factors.rows_together

    @property
    def in_words(self) -> str:
        return f"{self.cast.in_words} products"

    @property
    def share_a_scale(self) -> int | None:
        return self.cast.share_a_scale

    def rounded(self, values: Tensor) -> Tensor:
        made, together = values.float().clone(), self.factors.rows_together if self.rows_together > 1 else len(values)
        for first in range(0, len(values), max(together, 1)):
            products = self.factors.multiplied(values[first : first + together], 0)
            made[first : first + together] = self.factors.divided(self.cast.rounded(products), 0)
        return made
