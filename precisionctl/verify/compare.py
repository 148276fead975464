"""Two checkpoints compared in any two formats, tensor by tensor.

They meet under their Hugging Face names, where the padding of a vocabulary is no difference, and are read in pieces, so
memory does not grow with the model.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from precisionctl.checkpoints.base import Reader
from precisionctl.fp8.numerics import rounded_up
from precisionctl.fp8.state import Fp8State, Fp8States
from precisionctl.verify.codes import CodesComparison, compare_codes
from precisionctl.verify.engine_rules import Directory
from precisionctl.verify.hf_tensors import HfTensors, Rows

Status = Literal["exact", "encoded", "differs", "shape", "only in A", "only in B"]


@dataclass(frozen=True)
class TensorComparison:
    """One tensor. `encoded`: one side is exactly the FP8 encoding of the other under the scale stored with it.

    SQNR in dB (infinite without noise) and the largest absolute error are of B's values against A's; None
    where the two cannot be subtracted.
    """

    name: str
    status: Status
    dtypes: str
    sqnr_db: float | None = None
    max_abs_error: float | None = None
    shapes: str = ""
    """Where they are not the same."""

    @property
    def equal(self) -> bool:
        return self.status in ("exact", "encoded")


@dataclass(frozen=True)
class Comparison:
    """`settings` has a line for each setting that makes other logits of the same weights, and for each static input
    scale that differs; `fp8` one for each difference in FP8 state, None where the state was not compared, because
    no side has any, or only one. `codes` tells of every weight that is FP8 codes on either side, where that was asked
    for."""

    tensors: tuple[TensorComparison, ...]
    settings: tuple[str, ...]
    fp8: tuple[str, ...] | None
    codes: tuple[CodesComparison, ...] = ()

    @property
    def equal(self) -> bool:
        return all(tensor.equal for tensor in self.tensors) and not self.settings and not self.fp8

    def as_json(self) -> dict[str, Any]:
        return {"equal": self.equal} | asdict(self)


def compare(a: Reader, b: Reader, *, fp8: bool = False, on_bytes: Callable[[int], None] = lambda n: None) -> Comparison:
    """Compare every tensor of two checkpoints, and their FP8 state where both have one.

    With `fp8`, state is compared also where only one has any, and FP8 weights are compared code by code too. `on_bytes`
    is told of stored bytes of A that have been compared. Raises MappingError where one of them does not fit its own
    architecture.
    """
    left, right = HfTensors(a), HfTensors(b)
    tensors = []
    for name in [*left.specs, *(name for name in right.specs if name not in left.specs)]:
        tensors.append(_compare_tensor(name, left, right))
        on_bytes(left.nbytes(name))
    tensors += [TensorComparison(name, "only in A", left.stored_dtype(name)) for name in left.nonzero_extras()]
    tensors += [TensorComparison(name, "only in B", right.stored_dtype(name)) for name in right.nonzero_extras()]
    having = sum(reader.fp8 is not None for reader in (a, b))
    states = tuple(_state_differences(a.fp8, b.fp8)) if having == 2 or (having and fp8) else None
    codes = tuple(compare_codes(a, b)) if fp8 else ()
    return Comparison(tuple(tensors), tuple(_setting_differences(a, b)), states, codes)


def _setting_differences(a: Reader, b: Reader) -> Iterator[str]:
    """Input scales that one side has rounded to BF16 are no difference: an export for transformers does."""
    for field, (mine, others) in a.model.differences(b.model).items():
        yield _differing(field, mine, others)
    if isinstance(a, Directory) and isinstance(b, Directory):
        for name in sorted(a.input_scales.keys() & b.input_scales.keys()):
            left, right = a.input_scales[name], b.input_scales[name]
            if right not in (left, _in_bf16(left)) and left != _in_bf16(right):
                yield _differing(f"{name}: input scale", left, right)


def _in_bf16(scale: float) -> float:
    return float(rounded_up(torch.tensor(scale), "BF16"))


def _differing(name: str, left: object, right: object) -> str:
    return f"{name} is {_in_words(left)} in A, {_in_words(right)} in B"


def _in_words(setting: object) -> str:
    return "none" if setting is None else str(setting)


def _compare_tensor(name: str, a: HfTensors, b: HfTensors) -> TensorComparison:
    if name not in b.specs:
        return TensorComparison(name, "only in A", a.dtype(name))
    if name not in a.specs:
        return TensorComparison(name, "only in B", b.dtype(name))
    dtypes = " / ".join(dict.fromkeys((a.dtype(name), b.dtype(name))))
    if a.specs[name].shape != b.specs[name].shape:
        shapes = f"{list(a.specs[name].shape)} / {list(b.specs[name].shape)}"
        return TensorComparison(name, "shape", dtypes, shapes=shapes)
    verdicts = {_verdict(left, right) for left, right in _pieces(name, a, b)}
    sqnr_db, max_abs_error = (math.inf, 0.0) if verdicts == {"exact"} else _error(_pieces(name, a, b))
    worst = next(status for status in _WORST_FIRST if status in verdicts)
    return TensorComparison(name, worst, dtypes, sqnr_db, max_abs_error)


_WORST_FIRST: tuple[Status, ...] = ("differs", "encoded", "exact")


def _pieces(name: str, a: HfTensors, b: HfTensors) -> Iterator[tuple[Rows, Rows]]:
    for row, rows in a.pieces(name):
        yield a.read(name, row, rows), b.read(name, row, rows)


def _verdict(a: Rows, b: Rows) -> Status:
    if a.scale_inv is None and b.scale_inv is None and a.stored.dtype == b.stored.dtype:
        return "exact" if torch.equal(a.stored.view(torch.uint8), b.stored.view(torch.uint8)) else "differs"
    left, right = a.values, b.values
    if bool(((left == right) | (left.isnan() & right.isnan())).all()):
        return "exact"
    one_is_codes = (a.scale_inv is None) != (b.scale_inv is None)
    return "encoded" if one_is_codes and (a.encodes(right) or b.encodes(left)) else "differs"


def _error(pieces: Iterable[tuple[Rows, Rows]]) -> tuple[float, float]:
    """SQNR in dB, `10 log10(sum a^2 / sum (a - b)^2)`, summed in FP64, and the largest absolute error."""
    signal = noise = largest = 0.0
    for a, b in pieces:
        left, right = a.values.double(), b.values.double()
        error = left - right
        signal += float(left.square().sum())
        noise += float(error.square().sum())
        largest = max(largest, float(error.abs().max()))
    if noise == 0:
        return math.inf, largest
    if not math.isfinite(noise) or not math.isfinite(signal):  # an infinity or NaN on one side
        return -math.inf, largest
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf, largest


def _state_differences(a: Fp8States | None, b: Fp8States | None) -> Iterator[str]:
    """A line for each difference; equal means equal to the last bit."""
    if a is None or b is None:
        if a is not b:
            yield f"no FP8 state in {'A' if a is None else 'B'}"
        return
    left, right = asdict(a.recipe), asdict(b.recipe)
    yield from (f"recipe: {key} is {left[key]} and {right[key]}" for key in left if left[key] != right[key])
    for name in sorted(a.modules.keys() ^ b.modules.keys()):
        yield f"{name}: only in {'A' if name in a.modules else 'B'}"
    for name in sorted(a.modules.keys() & b.modules.keys()):
        yield from _module_differences(name, a.modules[name], b.modules[name])
    for name in sorted(a.raw.keys() | b.raw.keys()):
        if name not in a.raw or name not in b.raw or not torch.equal(a.raw[name], b.raw[name]):
            yield f"{name}: payloads that were not understood differ"


def _module_differences(name: str, a: Fp8State, b: Fp8State) -> Iterator[str]:
    for role in sorted(a.roles.keys() | b.roles.keys()):
        left, right = a.roles.get(role), b.roles.get(role)
        if left is None or right is None:
            yield f"{name} {role}: only in {'A' if right is None else 'B'}"
        elif not torch.equal(left.scale, right.scale):
            yield f"{name} {role}: scale is {left.scale.tolist()} and {right.scale.tolist()}"
        elif not torch.equal(left.amax_history, right.amax_history):
            yield f"{name} {role}: the amax histories differ"
