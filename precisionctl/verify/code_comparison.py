"""codes: what has become of FP8 codes, weight by weight, between two checkpoints; or of one on its way through BF16."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from precisionctl.checkpoints.base import Reader
from precisionctl.export.weight_encodings import weight_encodings
from precisionctl.verify.hf_tensors import HfTensors, Rows


@dataclass(frozen=True)
class CodesComparison:
    """One weight that is FP8 codes on either side.

    `changed` of its `codes` are others in B than in A. Where a side has values, they are encoded for this: under the
    scales that they had when they were codes, if those are known, else under the other side's.

    `scale_ratio` is the smallest and largest of B's scale_inv over A's, element by element. SQNR in dB is of B's
    values against A's. `idempotent`: decoded to BF16 and encoded again, the codes of either side are what they were.
    """

    name: str
    codes: int
    changed: int
    scale_ratio: tuple[float, float]
    sqnr_db: float
    idempotent: bool


def compare_codes(a: Reader, b: Reader | None) -> Iterator[CodesComparison]:
    """Compare every weight that both checkpoints have, and at least one of them as codes. Without B, A is compared with
    itself after its codes have been BF16."""
    left, right = _Coded(a), None if b is None else _Coded(b)
    for name, spec in left.tensors.specs.items():
        if right is None:
            if left.is_codes(name):
                yield _compare(name, left, None)
        elif name in right.tensors.specs and right.tensors.specs[name].shape == spec.shape:
            if left.is_codes(name) or right.is_codes(name):
                yield _compare(name, left, right)


class _Coded:
    """A checkpoint's tensors, and how those that are values now were coded before."""

    def __init__(self, reader: Reader) -> None:
        self.tensors = HfTensors(reader)
        encodings = None if reader.encodings else weight_encodings(reader)
        self._before = encodings.by_name if encodings else {}

    def is_codes(self, name: str) -> bool:
        return self.tensors.is_codes(name)

    def read(self, name: str, row: int, rows: int) -> tuple[Rows, Rows | None]:
        """Rows, and what has their scales: the rows themselves, or, of values that were codes once, rows without any
        numbers that have the old scales. None where no scales are known."""
        found = self.tensors.read(name, row, rows)
        if found.scale_inv is not None:
            return found, found
        before = self._before.get(name)
        if before is None or before.dtype.itemsize != 1:
            return found, None
        scales = before.scales(row, *found.stored.shape).expand(rows, -1)
        return found, Rows(torch.empty(0, dtype=before.dtype), scales)


def _compare(name: str, a: _Coded, b: _Coded | None) -> CodesComparison:
    spec = a.tensors.specs[name]
    changed, low, high, idempotent = 0, math.inf, 0.0, True
    signal = noise = 0.0
    for row, rows in a.tensors.pieces(name):
        left, how_left = a.read(name, row, rows)
        right, how_right = b.read(name, row, rows) if b else (Rows(left.values.bfloat16(), None), None)
        one, other = how_left or how_right, how_right or how_left
        assert one is not None and other is not None, "one of them is codes"
        changed += int((_codes(left, one).view(torch.uint8) != _codes(right, other).view(torch.uint8)).sum())
        ratio = _scales(other) / _scales(one)
        low, high = min(low, float(ratio.min())), max(high, float(ratio.max()))
        for each in (left, right):
            idempotent &= each.scale_inv is None or each.encodes(each.values.bfloat16())
        before, after = left.values.double(), right.values.double()
        signal += float(before.square().sum())
        noise += float((before - after).square().sum())
    sqnr = math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal > 0 else -math.inf
    return CodesComparison(name, spec.rows * spec.columns, changed, (low, high), sqnr, idempotent)


def _codes(rows: Rows, how: Rows) -> Tensor:
    return rows.stored if rows.scale_inv is not None else how.encoded(rows.stored)


def _scales(rows: Rows) -> Tensor:
    assert rows.scale_inv is not None
    return rows.scale_inv
