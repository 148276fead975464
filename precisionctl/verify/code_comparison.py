"""codes: what has become of FP8 codes, weight by weight, between two checkpoints; or of one on its way through BF16."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precisionctl.codes.encoding import Encoding
from precisionctl.codes.statistics import decibels
from precisionctl.export.weight_encodings import weight_encodings
from precisionctl.processes import in_processes
from precisionctl.torch_when_used import one_torch_thread
from precisionctl.verify.hf_tensors import HfTensors, StoredRows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CodesComparison:
    """A weight that is codes in A, in B or in both.

    `changed` is the number of its `codes` that differ between A and B. A side that has values is encoded for this:
    under the scales that it had when it was codes, if they are known, else under the other side's.

    `scale_ratio` is the smallest and the largest ratio of B's scale_inv to A's, over all elements. SQNR in dB is that
    of B's values against A's. `idempotent`: decoding to BF16 and encoding again gives the same codes, on each side.
    """

    name: str
    codes: int
    changed: int
    scale_ratio: tuple[float, float]
    sqnr_db: float
    idempotent: bool


def compare_codes(a: HfTensors, b: HfTensors | None, workers: int = 1) -> list[CodesComparison]:
    """Compare the codes of every weight that both checkpoints have and at least one stores as codes, in so many
    processes. Without B, A is compared with itself after a way through BF16."""
    left, right = _Coded(a), None if b is None else _Coded(b)
    sizes = {
        name: a.nbytes(name)
        for name, spec in a.specs.items()
        if (b is None or name in b.specs and b.specs[name].shape == spec.shape)
        and (a.is_codes(name) or b is not None and b.is_codes(name))
    }
    results = in_processes(lambda name: _compare(name, left, right), [*sizes], [*sizes.values()], workers)
    with one_torch_thread(), closing(results):
        found = dict(results)
    return [found[name] for name in sizes]


class _Coded:
    """A checkpoint's tensors, and how those that are values now were coded before."""

    def __init__(self, tensors: HfTensors) -> None:
        self.tensors = tensors
        encodings = None if tensors.reader.encodings else weight_encodings(tensors.reader)
        self._before = encodings.by_name if encodings else {}

    def read(self, name: str, row: int, rows: int) -> tuple[StoredRows, Encoding | None]:
        """Rows, and their encoding, or that which values had when they were codes; None where none is known."""
        found = self.tensors.read(name, row, rows)
        if found.encoding is not None:
            return found, found.encoding
        before = self._before.get(name)
        return found, before.of_rows(row, rows) if before else None


def _compare(name: str, a: _Coded, b: _Coded | None) -> CodesComparison:
    spec = a.tensors.specs[name]
    changed, low, high, idempotent = 0, math.inf, 0.0, True
    signal = noise = 0.0
    for row, rows in a.tensors.pieces(name):
        left, how_left = a.read(name, row, rows)
        right, how_right = b.read(name, row, rows) if b else (StoredRows.of(left.values.bfloat16()), None)
        one, other = how_left or how_right, how_right or how_left
        assert one is not None and other is not None, "one of them is codes"
        before, after = _codes(left, one), _codes(right, other)
        changed += one.element.differing(before, after) if before.shape == after.shape else spec.columns * rows
        scales = [each.scales(0, rows, spec.columns) for each in (one, other)]
        ratio = scales[1] / scales[0]
        low, high = min(low, float(ratio.min())), max(high, float(ratio.max()))
        for each in (left, right):
            idempotent &= each.encoding is None or each.encodes(each.values.bfloat16())
        values = left.values.double()
        signal += float(values.square().sum())
        noise += float((values - right.values.double()).square().sum())
    sqnr = decibels(signal, noise)
    return CodesComparison(name, spec.rows * spec.columns, changed, (low, high), sqnr, idempotent)


def _codes(rows: StoredRows, how: Encoding) -> Tensor:
    return rows.stored if rows.encoding is not None else how.encode_rows(rows.stored, 0)
