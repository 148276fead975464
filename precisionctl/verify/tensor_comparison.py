"""Tensors of two checkpoints compared one by one: whether they are the same to the last bit, or one is the other
rounded or encoded; else how far they are apart. They are read in pieces, so memory does not grow with the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from precisionctl.codes.statistics import decibels
from precisionctl.processes import in_processes
from precisionctl.torch_when_used import one_torch_thread, torch
from precisionctl.verify.differences import Differences, comparable, differing, measurable
from precisionctl.verify.hf_tensors import HfTensors, StoredRows
from precisionctl.verify.losses import Losses, lost_in_rounding

if TYPE_CHECKING:
    from torch import Tensor

Status = Literal["exact", "rounded", "encoded", "lost", "signs of zeros", "differs", "shape", "only in A", "only in B"]

DIFFERS: tuple[Status, ...] = ("signs of zeros", "differs")
"""Values that differ, of one shape: in nothing but 0 and -0, or in more."""


@dataclass(frozen=True)
class TensorComparison:
    """One tensor. `rounded`: one side is exactly the other rounded to its dtype, as mlx-lm's norms plus one are, too.
    `encoded`: one side is exactly the encoding of the other, under the scale stored with it, or as ggml or MLX encodes
    it. `lost`: it is that, but does not represent the values, as its scales make no sense, or as FP16 has no numbers so
    small (`verify/losses.py`). `signs of zeros`: nothing differs but that some zeros are 0 on one side and -0 on the
    other.

    SQNR in dB (infinite without noise), the largest absolute error, and the number of values that differ (`differing`)
    compare B's values with A's; None if they cannot be subtracted. `remark` says what codes or rounding have
    lost, if that is worth knowing.
    """

    name: str
    status: Status
    dtypes: str
    sqnr_db: float | None = None
    max_abs_error: float | None = None
    differing: int | None = None
    shapes: str = ""
    """Both shapes, if they differ."""
    remark: str = ""

    @property
    def equal(self) -> bool:
        return self.status in ("exact", "rounded", "encoded")


def compare_tensors(
    a: HfTensors, b: HfTensors, on_bytes: Callable[[int], None], workers: int
) -> list[TensorComparison]:
    """Compare all tensors that either side has, in this order: A's, then what B alone has. `on_bytes` is told how many
    bytes each of them has, as one after the other is done."""
    sizes = {name: a.nbytes(name) for name in (*a.specs, *b.specs)}
    found: dict[str, TensorComparison] = {}
    results = in_processes(lambda name: _compare_tensor(name, a, b), [*sizes], [*sizes.values()], workers)
    with closing(results):
        for name, tensor in results:
            found[name] = tensor
            on_bytes(sizes[name])
    return [found[name] for name in sizes]


def compare_extras(a: HfTensors, b: HfTensors) -> Iterator[TensorComparison]:
    """Compare biases that Hugging Face has no place for. A missing one counts as zero."""
    left, right = a.extras(), b.extras()
    for name in dict.fromkeys((*left, *right)):
        if name in left and name in right:
            dtypes = " / ".join(dict.fromkeys((a.stored_dtype(name), b.stored_dtype(name))))
            if left[name].shape != right[name].shape:
                yield _of_two_shapes(name, dtypes, left[name].shape, right[name].shape)
                continue
            mine, others = (StoredRows.of(side[name].reshape(1, -1)) for side in (left, right))
            if (status := _verdict(mine, others)) != "exact":
                yield _measured(name, status, dtypes, [(mine, others)])
        elif name not in right and bool(left[name].any()):
            yield TensorComparison(name, "only in A", a.stored_dtype(name))
        elif name not in left and bool(right[name].any()):
            yield TensorComparison(name, "only in B", b.stored_dtype(name))


def _compare_tensor(name: str, a: HfTensors, b: HfTensors) -> TensorComparison:
    if name not in b.specs:
        return TensorComparison(name, "only in A", a.dtype(name))
    if name not in a.specs:
        return TensorComparison(name, "only in B", b.dtype(name))
    dtypes = " / ".join(dict.fromkeys((a.dtype(name), b.dtype(name))))
    if a.specs[name].shape != b.specs[name].shape:
        return _of_two_shapes(name, dtypes, a.specs[name].shape, b.specs[name].shape)
    if all(left.same_bytes(right) for left, right in _pieces(name, a, b)):  # which takes no PyTorch
        return TensorComparison(name, "exact", dtypes, math.inf, 0.0, 0)
    with one_torch_thread():
        verdicts = {_verdict(left, right) for left, right in _pieces(name, a, b)}
        worst: Status = next((status for status in _WORST_FIRST if status in verdicts), "exact")  # there may be no rows
        if worst == "exact":
            return TensorComparison(name, worst, dtypes, math.inf, 0.0, 0)
        if worst in ("differs", "rounded"):
            return _measured(name, worst, dtypes, _pieces(name, a, b))
        losses, error = _losses(name, a, b)
        status: Status = "lost" if losses.why else worst
        return TensorComparison(name, status, dtypes, *error, remark=losses.why or losses.remark)


def _of_two_shapes(name: str, dtypes: str, of_a: Sequence[int], of_b: Sequence[int]) -> TensorComparison:
    return TensorComparison(name, "shape", dtypes, shapes=f"{list(of_a)} / {list(of_b)}")


def _measured(
    name: str, status: Status, dtypes: str, pieces: Iterable[tuple[StoredRows, StoredRows]]
) -> TensorComparison:
    found, unit, plain = Differences(), 0.0, status == "rounded"
    for left, right in pieces:
        found.see(left, right)
        plain = plain and left.cast is None and right.cast is None  # of norms plus one, the sum is what was rounded
        if plain:
            unit = max(torch.finfo(side.stored.dtype).eps for side in (left, right)) / 2
    if status == "differs" and not found.largest_error:  # NaN and infinity are infinitely far from other values
        status = "signs of zeros"
    why, remark = lost_in_rounding(found, unit) if plain else ("", "")
    status = "lost" if why else status
    return TensorComparison(
        name, status, dtypes, found.sqnr_db, found.largest_error, found.differing, remark=why or remark
    )


_WORST_FIRST: tuple[Status, ...] = ("differs", "encoded", "rounded", "exact")


def _pieces(name: str, a: HfTensors, b: HfTensors) -> Iterator[tuple[StoredRows, StoredRows]]:
    together = max(side.rows_together(name) for side in (a, b))
    for row, rows in a.pieces(name, together):
        yield a.read(name, row, rows), b.read(name, row, rows)


def _losses(name: str, a: HfTensors, b: HfTensors) -> tuple[Losses, tuple[float, float, int]]:
    """The losses of the side that is codes against the other side's values; and SQNR, largest error and number of
    values that differ, as `Differences` has them."""
    coded = a if a.cast(name) or (a.is_codes(name) and not b.cast(name)) else b
    spec = a.specs[name]
    packed, most_zeros = coded.is_packed(name), coded.most_zeros(name)
    losses = Losses(spec.rows, spec.columns, coded.block(name), packed=packed, most_zeros=most_zeros)
    row, signal, count = 0, 0.0, 0
    for left, right in _pieces(name, a, b):
        codes, uncoded = (left, right) if coded is a else (right, left)
        values, decoded = measurable(uncoded.values, codes.values)
        count += differing(*comparable(left, right))
        losses.see(row, codes.stored, values, decoded)
        signal += float(decoded.double().square().sum()) if coded is a else 0.0
        row += len(values)
    sqnr = decibels(signal if coded is a else losses.total.power, losses.total.error)
    return losses, (sqnr, losses.largest_error, count)


def _verdict(a: StoredRows, b: StoredRows) -> Status:
    if a.same_bytes(b):
        return "exact"
    if differing(*comparable(a, b)) == 0:
        return "exact"
    are_values = not (a.is_codes or b.is_codes)
    if are_values and (_is_rounding(a.stored, b.stored) or _is_rounding(b.stored, a.stored)):
        return "rounded"
    left, right = a.values, b.values
    one_is_codes = a.is_codes != b.is_codes or (a.cast is None) != (b.cast is None)  # of the other's, which may be FP8
    made = [side for side, values in ((a, right), (b, left)) if one_is_codes and side.encodes(values)]
    if not made:
        return "differs"
    return "encoded" if any(side.cast is None or side.cast.share_a_scale for side in made) else "rounded"


def _is_rounding(stored: Tensor, of: Tensor) -> bool:
    """Whether `stored`, in BF16, FP16, or beside FP64 in FP32, is exactly `of` rounded, and no value became infinite by
    rounding."""
    in_half = stored.dtype in (torch.bfloat16, torch.float16)
    return (
        (in_half or (stored.dtype, of.dtype) == (torch.float32, torch.float64))
        and of.is_floating_point()
        and torch.equal(stored.isfinite(), of.isfinite())
        and differing(stored.float(), of.to(stored.dtype).float()) == 0
    )
