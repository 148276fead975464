"""codes: what has become of codes of all kinds that are read with their scales, weight by weight, between two
checkpoints; or of those of one on their way through BF16.

Codes that are decoded as they are read (GGUF's, MLX's, GPTQ's, bitsandbytes') have no scales here. Weights that one
checkpoint has under other rows or columns than it stores codes of are compared as values alone (`codes_as_values`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.codes.encoding import Encoding
from precisionctl.processes import in_processes
from precisionctl.torch_when_used import one_torch_thread, torch
from precisionctl.verify.differences import Differences
from precisionctl.verify.hf_tensors import HfTensors, StoredRows


@dataclass(frozen=True)
class CodesComparison:
    """A weight that is codes in A, in B or in both.

    `changed` is the number of its `codes` that differ between A and B; all of them do if they are of two elements. A
    side that has values is encoded for this: under the scales that it had when it was codes, if they are known, else
    under the other side's.

    `scale_ratio` is the smallest and the largest ratio of B's scale_inv to A's, over all elements: 1 where both are the
    same, zeros too, and infinite where A's alone is 0. SQNR in dB is that of B's values against A's, as for tensors.
    `idempotent`: decoding to BF16 and encoding again gives the same codes, on each side.
    """

    name: str
    codes: int
    changed: int
    scale_ratio: tuple[float, float]
    sqnr_db: float
    idempotent: bool


def compare_codes(
    a: HfTensors,
    b: HfTensors,
    before: tuple[WeightEncodings | None, WeightEncodings | None],
    workers: int,
) -> list[CodesComparison]:
    """Compare the codes of every weight that both checkpoints have in one shape and at least one reads as codes, in so
    many processes. `before` is how the weights of each were coded that are values now, where that is known."""
    left, right = (_Coded(side, encodings) for side, encodings in zip((a, b), before, strict=True))
    names = (
        name
        for name, spec in a.specs.items()
        if name in b.specs and b.specs[name].shape == spec.shape and (a.is_codes(name) or b.is_codes(name))
    )
    return _in_processes(a, names, lambda name: _compare(name, left, right), workers)


def compare_with_bf16(reader: Reader, workers: int = 1) -> list[CodesComparison]:
    """Compare the codes of every weight of a checkpoint, by its own name there, with themselves after a way through
    BF16."""
    tensors = HfTensors.as_stored(reader, reader.model, {name: reader.specs[name] for name in reader.encodings})
    here = _Coded(tensors, None)
    return _in_processes(tensors, tensors.specs, lambda name: _compare(name, here, None), workers)


def codes_as_values(a: HfTensors, b: HfTensors) -> list[str]:
    """The weights of both of which one stores codes that are not read as such."""
    both = (name for name in a.specs if name in b.specs)
    return [name for name in both if a.has_codes_as_values(name) or b.has_codes_as_values(name)]


def _in_processes(
    a: HfTensors, names: Iterable[str], compare: Callable[[str], CodesComparison], workers: int
) -> list[CodesComparison]:
    sizes = {name: a.nbytes(name) for name in names}
    with one_torch_thread(), closing(in_processes(compare, [*sizes], [*sizes.values()], workers)) as results:
        found = dict(results)
    return [found[name] for name in sizes]


class _Coded:
    """A checkpoint's tensors, and how those that are values now were coded before."""

    def __init__(self, tensors: HfTensors, encodings: WeightEncodings | None) -> None:
        self.tensors = tensors
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
    changed, ratios, idempotent, found = 0, list[float](), True, Differences()
    for row, rows in a.tensors.pieces(name):
        left, how_left = a.read(name, row, rows)
        right, how_right = b.read(name, row, rows) if b else (StoredRows.of(left.values.bfloat16()), None)
        one, other = how_left or how_right, how_right or how_left
        assert one is not None and other is not None, "one of them is codes"
        before, after = (
            rows_of.stored if rows_of.encoding is not None else how.encode_rows(rows_of.stored, 0)
            for rows_of, how in ((left, one), (right, other))
        )
        changed += one.element.differing(before, after) if one.element == other.element else spec.columns * rows
        of_a, of_b = (each.scales(0, rows, spec.columns) for each in (one, other))
        ratio = torch.where(of_a == of_b, 1.0, of_b / of_a).nan_to_num(math.inf, math.inf, -math.inf)
        ratios += (float(ratio.min()), float(ratio.max()))
        idempotent &= all(_survive(each, each.encoding) for each in (left, right) if each.encoding is not None)
        found.see(left, right)
    span = (min(ratios), max(ratios)) if ratios else (1.0, 1.0)  # there may be no rows
    return CodesComparison(name, spec.rows * spec.columns, changed, span, found.sqnr_db, idempotent)


def _survive(codes: StoredRows, how: Encoding) -> bool:
    """Whether codes are the same after a way through BF16."""
    again = how.encode_rows(codes.values.bfloat16(), 0)
    return torch.equal(again.view(torch.uint8), codes.stored.view(torch.uint8))
