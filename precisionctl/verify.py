"""verify: compare two checkpoints in any two formats, tensor by tensor; or one with an engine's rules.

Two checkpoints meet under their Hugging Face names, where the padding of a vocabulary is no difference. They
are read in pieces, so memory does not grow with the model.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from precisionctl.architectures.megatron_args import MEGATRON_ONLY
from precisionctl.checkpoints.base import Chunked, Reader, read_rows, read_tensor
from precisionctl.engines.base import Engine, Finding
from precisionctl.errors import UnknownFormat
from precisionctl.fp8 import numerics
from precisionctl.fp8.state import Fp8State, Fp8States
from precisionctl.lower import Segment, lower
from precisionctl.model_shape import ModelShape
from precisionctl.plan import Job, make_plan

PIECE = 1 << 20
"""Elements compared at a time."""

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

    @property
    def equal(self) -> bool:
        return self.status in ("exact", "encoded")


@dataclass(frozen=True)
class Comparison:
    """`settings` has a line for each setting that makes other logits of the same weights, and for each static input
    scale that differs; `fp8` one for each difference in FP8 state, None where the state was not compared, because
    only one side has any."""

    tensors: tuple[TensorComparison, ...]
    settings: tuple[str, ...]
    fp8: tuple[str, ...] | None

    @property
    def equal(self) -> bool:
        return all(tensor.equal for tensor in self.tensors) and not self.settings and not self.fp8

    def as_json(self) -> dict[str, Any]:
        return {"equal": self.equal} | asdict(self)


def compare(a: Reader, b: Reader, *, fp8: bool = False, on_bytes: Callable[[int], None] = lambda n: None) -> Comparison:
    """Compare every tensor of two checkpoints, and their FP8 state where both have one (or if `fp8` asks for it).

    `on_bytes` hears of stored bytes of A that have been compared. Raises MappingError where one does not fit its own
    architecture: then there is nothing to compare yet.
    """
    left, right = _HfTensors(a), _HfTensors(b)
    tensors = []
    for name in [*left.specs, *(name for name in right.specs if name not in left.specs)]:
        tensors.append(_compare_tensor(name, left, right))
        on_bytes(left.nbytes(name))
    tensors += [TensorComparison(name, "only in A", left.stored_dtype(name)) for name in left.nonzero_extras()]
    tensors += [TensorComparison(name, "only in B", right.stored_dtype(name)) for name in right.nonzero_extras()]
    both = a.fp8 is not None and b.fp8 is not None
    states = tuple(_state_differences(a.fp8, b.fp8)) if both or fp8 else None
    return Comparison(tuple(tensors), tuple(_setting_differences(a, b)), states)


_SHOWN = {
    *("architecture", "num_layers", "hidden_size", "ffn_hidden_size", "vocab_size", "max_position_embeddings"),
    *("tied_embeddings", "qkv_bias", "proj_bias", "mlp_bias", "hf_zero_centered_gamma", "mtp_num_layers"),
    *MEGATRON_ONLY,
}
_SETTINGS = tuple(field.name for field in fields(ModelShape) if field.name not in _SHOWN)
"""Fields of ModelShape that no tensor shows, and that make another function of the same tensors."""


def _setting_differences(a: Reader, b: Reader) -> Iterator[str]:
    for field in _SETTINGS:
        left, right = getattr(a.model, field), getattr(b.model, field)
        if left != right:
            yield f"{field} is {left} and {right}"
    if isinstance(a, Directory) and isinstance(b, Directory):
        for name in sorted(a.input_scales.keys() & b.input_scales.keys()):
            if a.input_scales[name] != b.input_scales[name]:
                yield f"{name}: input scale is {a.input_scales[name]} and {b.input_scales[name]}"


@dataclass(frozen=True)
class _Rows:
    """Rows as stored, `[n, columns]`, with a scale_inv for each, `[n, 1]`, or for each element, where they are FP8
    codes."""

    stored: Tensor
    scale_inv: Tensor | None

    @property
    def values(self) -> Tensor:
        """FP32."""
        return self.stored.float() if self.scale_inv is None else numerics.decode(self.stored, self.scale_inv)

    def encodes(self, values: Tensor) -> bool:
        """Whether these codes are the encoding of FP32 `values` under the scales stored with them."""
        if self.scale_inv is None:
            return False
        codes = torch.empty_like(self.stored)
        numerics.encode_by_scale_inv(values, self.scale_inv, codes, torch.empty(numerics.PIECE))
        return torch.equal(codes.view(torch.uint8), self.stored.view(torch.uint8))


class _HfTensors:
    """A checkpoint's tensors by Hugging Face name, whatever its layout."""

    def __init__(self, reader: Reader) -> None:
        plan = make_plan(reader, "hf", respelled=True)
        self._reader = reader
        self._kept = "", torch.empty(0)
        self.specs = plan.targets
        self._model = plan.model
        self._segments: dict[str, list[Segment]] = {name: [] for name in plan.targets}
        self._computed: dict[str, Job] = {}
        self._extras = [name for job in plan.jobs if not job.writes for name in job.reads]
        for job in plan.jobs:
            if plan.source != plan.target and not job.row.moves(plan.model):
                self._computed |= dict.fromkeys(job.writes, job)
                continue
            reads = {read: reader.specs[read].rows for read in job.reads}
            for segment in lower(job.row, plan.model, plan.source, plan.target, reads, job.writes):
                self._segments[segment.write].append(segment)

    def nonzero_extras(self) -> Iterator[str]:
        """Biases that Hugging Face has no place for, of which a conversion leaves out those that are zero."""
        for name in self._extras:
            if bool(read_tensor(self._reader, name).any()):
                yield name

    def stored_dtype(self, name: str) -> str:
        """Of a tensor of the checkpoint, by its own name."""
        return str(self._reader.specs[name].dtype).removeprefix("torch.")

    def dtype(self, name: str) -> str:
        """Of what is stored; a plan's targets have the dtype after decoding."""
        if name in self._computed:
            return self.stored_dtype(self._computed[name].reads[0])
        reads = (segment.read for segment in self._segments[name] if segment.read is not None)
        return str(next((self._reader.specs[read].dtype for read in reads), "zeros")).removeprefix("torch.")

    def nbytes(self, name: str) -> int:
        """What the checkpoint stores of it; 0 where it has no such tensor."""
        if name in self._computed:
            return self.specs[name].nbytes
        stored = [(segment.rows, segment.read) for segment in self._segments.get(name, ()) if segment.read is not None]
        specs = self._reader.specs
        return sum(rows * specs[read].columns * specs[read].dtype.itemsize for rows, read in stored)

    def read(self, name: str, row: int, rows: int) -> _Rows:
        if name in self._computed:
            values = self._compute(name).reshape(self.specs[name].rows, self.specs[name].columns)
            return _Rows(values[row : row + rows], None)
        parts = [part for segment in self._segments[name] if (part := self._part(segment, row, rows)) is not None]
        scales = [part.scale_inv for part in parts if part.scale_inv is not None]
        return _Rows(_joined([part.stored for part in parts]), _joined_scales(scales) if scales else None)

    def _compute(self, name: str) -> Tensor:
        """A tensor that is not rows of the Megatron one; the last is kept, for it is read piece by piece."""
        if self._kept[0] != name:
            job = self._computed[name]
            parts = job.row.split(read_tensor(self._reader, job.reads[0]), self._model)
            self._kept = name, parts[job.writes.index(name)]
        return self._kept[1]

    def _part(self, segment: Segment, row: int, rows: int) -> _Rows | None:
        """What a segment gives of rows `[row, row + rows)` of the tensor that it writes."""
        first = max(row, segment.write_row)
        count = min(row + rows, segment.write_row + segment.rows) - first
        if count <= 0:
            return None
        if segment.read is None:
            spec = self.specs[segment.write]
            return _Rows(torch.zeros(count, spec.columns, dtype=spec.dtype), None)
        start = segment.read_row + first - segment.write_row
        stored = read_rows(self._reader, segment.read, start, count)
        encoding = self._reader.encodings.get(segment.read)
        if encoding is None:
            return _Rows(stored, None)
        return _Rows(stored, encoding.scales(start, *stored.shape).expand(count, -1))


def _joined(parts: list[Tensor]) -> Tensor:
    """Rows one after the other, FP8 codes too, which torch does not join."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].element_size() > 1:
        return torch.cat(parts)
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _joined_scales(parts: list[Tensor]) -> Tensor:
    widest = max(part.shape[1] for part in parts)
    return torch.cat([part.expand(-1, widest) for part in parts])


def _compare_tensor(name: str, a: _HfTensors, b: _HfTensors) -> TensorComparison:
    if name not in b.specs:
        return TensorComparison(name, "only in A", a.dtype(name))
    if name not in a.specs:
        return TensorComparison(name, "only in B", b.dtype(name))
    dtypes = " / ".join(dict.fromkeys((a.dtype(name), b.dtype(name))))
    if a.specs[name].shape != b.specs[name].shape:
        return TensorComparison(name, "shape", dtypes)
    verdicts = {_verdict(left, right) for left, right in _pieces(name, a, b)}
    sqnr_db, max_abs_error = (math.inf, 0.0) if verdicts == {"exact"} else _error(_pieces(name, a, b))
    worst = next(status for status in _WORST_FIRST if status in verdicts)
    return TensorComparison(name, worst, dtypes, sqnr_db, max_abs_error)


_WORST_FIRST: tuple[Status, ...] = ("differs", "encoded", "exact")


def _pieces(name: str, a: _HfTensors, b: _HfTensors) -> Iterator[tuple[_Rows, _Rows]]:
    spec = a.specs[name]
    step = max(1, PIECE // spec.columns)
    for row in range(0, spec.rows, step):
        rows = min(step, spec.rows - row)
        yield a.read(name, row, rows), b.read(name, row, rows)


def _verdict(a: _Rows, b: _Rows) -> Status:
    if a.scale_inv is None and b.scale_inv is None and a.stored.dtype == b.stored.dtype:
        return "exact" if torch.equal(a.stored.view(torch.uint8), b.stored.view(torch.uint8)) else "differs"
    left, right = a.values, b.values
    if bool(((left == right) | (left.isnan() & right.isnan())).all()):
        return "exact"
    one_is_codes = (a.scale_inv is None) != (b.scale_inv is None)
    return "encoded" if one_is_codes and (a.encodes(right) or b.encodes(left)) else "differs"


def _error(pieces: Iterable[tuple[_Rows, _Rows]]) -> tuple[float, float]:
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


@runtime_checkable
class Directory(Protocol):
    """A Reader of what an engine is given: config.json, and every tensor as stored, scales too."""

    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def input_scales(self) -> Mapping[str, float]: ...
    @property
    def stored(self) -> Chunked: ...


def check(reader: Reader, engine: Engine) -> list[Finding]:
    """The rules of `engine` that a Hugging Face directory breaks. Raises UnknownFormat for anything else."""
    if not isinstance(reader, Directory):
        raise UnknownFormat(
            f"{engine.title} loads Hugging Face directories, this is {reader.container}",
            where=reader.path,
            do=f"Make one: precisionctl export-inference {reader.path} DST --target {engine.name}",
        )
    stored = reader.stored
    return engine.check(reader.config, stored.specs, lambda name: read_tensor(stored, name))
