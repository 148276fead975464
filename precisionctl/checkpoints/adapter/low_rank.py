"""A base's weights with an adapter's changes, computed in FP32 when their rows are read, and rounded once.

A matrix is computed in runs of rows that begin at fixed numbers, so its bits do not depend on which rows a conversion
asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precisionctl.checkpoints.chunks import Chunked, read_tensor, read_values
from precisionctl.codes import numerics
from precisionctl.codes.encoding import Encoding
from precisionctl.errors import PrecisionError
from precisionctl.param import TensorSpec
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

_ROOM = 1 << 18
"""Elements that are computed at a time, in FP32: 1 MiB."""


@dataclass(frozen=True)
class LowRank:
    """`scale * B @ A`, to be added to a matrix. The matrix may be only a part of the product: the rows from `first` on.

    `a` and `b` are the names of the factors. Factors of a stack of experts (`expert`: this one's number, of how many)
    are below each other in A, and alternate in the columns of B. `transposed`: the matrix is stored as [in, out], while
    the product is [out, in]. `magnitude` names the length that each row finally has (DoRA).
    """

    a: str
    b: str
    scale: float
    transposed: bool = False
    magnitude: str | None = None
    expert: tuple[int, int] = (0, 1)
    first: int = 0


class Factors:
    """The factors of an adapter, in FP32. The last ones are cached: a matrix is read in pieces, and the experts of a
    layer one after the other."""

    def __init__(self, adapter: Chunked) -> None:
        self.adapter = adapter
        self._last: tuple[LowRank, Tensor, Tensor] | None = None
        self._stored: dict[str, Tensor] = {}

    def of(self, change: LowRank) -> tuple[Tensor, Tensor]:
        """`left` [rows, rank] and `right` [rank, columns]: the change is `scale * left @ right`."""
        if self._last is not None and self._last[0] == change:
            return self._last[1:]
        if self._stored.keys() != {change.a, change.b}:
            self._stored = {name: read_tensor(self.adapter, name).float() for name in (change.a, change.b)}
        a, b = self._stored[change.a], self._stored[change.b]
        number, count = change.expert
        a, b = a.view(count, -1, a.shape[1])[number], b.view(b.shape[0], -1, count)[:, :, number]
        left, right = (a.t(), b.t()) if change.transposed else (b, a)
        self._last = change, left[change.first :].contiguous(), right.contiguous()
        return self._last[1:]


@dataclass(frozen=True)
class Merged:
    """The tensor `name` of `stored`, decoded if `encodings` has it, with `change` added if there is one, and rounded to
    the dtype of `spec`. Its rows are computed when they are read.

    Raises PrecisionError where a row is infinite or NaN and the stored number was not: what writes these rows takes
    them for stored ones, and lets such numbers pass. Codes store no infinity: one that they decode to is refused too.
    """

    stored: Chunked
    encodings: Mapping[str, Encoding]
    name: str
    spec: TensorSpec
    change: LowRank | None
    factors: Factors

    def rows(self, row: int, rows: int) -> Tensor:
        """Rows `[row, row + rows)` as `[rows, columns]`."""
        made = torch.empty(rows, self.spec.columns, dtype=self.spec.dtype.torch)
        step = max(1, _ROOM // self.spec.columns)
        for first in range(row // step * step, row + rows, step):
            run = self._values(first, min(step, self.spec.rows - first))
            start, end = max(first, row), min(first + len(run), row + rows)
            made[start - row : end - row] = run[start - first : end - first]
        return made

    def _values(self, row: int, rows: int) -> Tensor:
        stored = values = read_values(self.stored, self.encodings, self.name, row, rows).float()
        if self.change is not None:
            left, right = self.factors.of(self.change)
            values = values + left[row : row + rows] @ right * self.change.scale
            if self.change.magnitude is not None:
                lengths = read_tensor(self.factors.adapter, self.change.magnitude)[row : row + rows].float()
                values = (lengths / torch.linalg.norm(values, dim=1)).unsqueeze(1) * values
        rounded = values.to(self.spec.dtype.torch)
        if not numerics.are_finite(rounded):
            were = stored.isnan() if self.name in self.encodings else ~stored.isfinite()
            if bool((~rounded.isfinite() & ~were).any()):
                what = f"`{self.name}` with the adapter's changes has values that are infinite or NaN"
                raise PrecisionError(f"{what} in {self.spec.dtype}", do=_BROKEN)
        return rounded


_BROKEN = "The adapter, or its base, is broken there: copy it again, or take an earlier one."
