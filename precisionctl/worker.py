"""One job at a time: read, map, cast, write, piece by piece through a few buffers of its own.

A job is lowered to segments, so memory does not grow with the model. Where source and target hold the same dtype,
bytes are copied and no number is looked at. Otherwise each piece is decoded, rounded or encoded on its way.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Protocol

import torch
from torch import Tensor

from precisionctl.cast import Encode
from precisionctl.checkpoints.base import Chunked, check_rows, read_rows, write_rows
from precisionctl.errors import DamagedCheckpoint, ShapeMismatch
from precisionctl.fp8 import numerics
from precisionctl.fp8.encoding import Encoding
from precisionctl.lower import Segment, lower
from precisionctl.plan import Job, Plan

BUFFER = 4 << 20
"""Bytes moved at a time. With 1 MiB an export took a tenth longer, for the Python around each piece; larger ones gain
nothing more and leave a core's own cache."""


class Source(Chunked, Protocol):
    """The part of a Reader that a run needs."""

    @property
    def encodings(self) -> Mapping[str, Encoding]: ...


def written(job: Job) -> Sequence[str]:
    """The tensors that a job writes, its scales included."""
    return (*job.writes, *job.encode.weight_scales.values(), *job.encode.input_scales) if job.encode else job.writes


def held_bytes(plan: Plan) -> int:
    """The most memory that a worker holds for this plan: its buffers, or a row of a tensor that is longer; and a row
    of the table that does more than move, as read and as made, in FP32 at worst."""
    rows = [spec.columns * max(4, spec.dtype.itemsize) for spec in plan.targets.values()]
    computed = (
        [0]
        if plan.source == plan.target
        else [
            8 * sum(plan.targets[name].rows * plan.targets[name].columns for name in job.writes)
            for job in plan.jobs
            if not job.row.moves(plan.model)
        ]
    )
    return 2 * max(BUFFER, *rows) + 4 * numerics.PIECE + max(computed, default=0)


class Worker:
    """Does jobs of a plan, one after the other, with memory for one piece: bytes as read, bytes to be written, and
    FP32 numbers under way."""

    def __init__(self, plan: Plan, reader: Source, writer: Chunked, weight_amax: bool = False) -> None:
        self._plan = plan
        self._reader = reader
        self._writer = writer
        self._weight_amax = weight_amax
        self._read_buffer = torch.empty(BUFFER, dtype=torch.uint8)
        self._write_buffer = torch.empty(BUFFER, dtype=torch.uint8)
        self._scratch = torch.empty(numerics.PIECE)

    def do(self, job: Job) -> float | None:
        """Returns the amax of the job's weight where it was asked for or needed."""
        for copy in job.copies:
            self._check_equal(job.reads[0], copy)
        if not job.writes:
            self._check_zero(job)
            return None
        if job.reads and self._plan.source != self._plan.target and not job.row.moves(self._plan.model):
            return self._compute(job)
        reads = {name: self._reader.specs[name].rows for name in job.reads}
        segments = lower(job.row, self._plan.model, self._plan.source, self._plan.target, reads, job.writes)
        if job.encode:
            return self._do_encode(job, job.encode, segments)
        seen: list[Tensor] | None = [] if self._needs_amax(job) else None
        for segment in segments:
            if segment.read is None:
                self._zero(segment)
            else:
                self._move(segment, segment.read, seen)
        return float(torch.stack(seen).amax()) if seen else None

    def _do_encode(self, job: Job, encode: Encode, segments: list[Segment]) -> float | None:
        amax = self._amax(job.reads) if self._needs_amax(job) else None
        for segment in segments:
            if segment.read is None:
                self._zero(segment)
            else:
                self._encode(segment, segment.read, encode, amax)
        self._write_scales(encode, amax)
        return None if amax is None else float(amax)

    def _compute(self, job: Job) -> float | None:
        """A row that does more than move: its tensors whole, in the wider dtype of the two sides."""
        model, wanted = self._plan.model, self._writer.specs[job.writes[0]].dtype
        parts = [self._whole(name, torch.float32 if job.encode else wanted) for name in job.reads]
        made = (job.row.merge(parts, model),) if self._plan.target == "megatron" else job.row.split(parts[0], model)
        amax = torch.stack([numerics.amax(part) for part in made]).amax() if self._needs_amax(job) else None
        for name, tensor in zip(job.writes, made, strict=True):
            rows = tensor.reshape(self._writer.specs[name].rows, -1)
            if job.encode:
                self._encode_rows(name, 0, rows, job.encode, amax)
            else:
                self._put(name, 0, rows.to(wanted))
        if job.encode:
            self._write_scales(job.encode, amax)
        return None if amax is None else float(amax)

    def _whole(self, name: str, wanted: torch.dtype) -> Tensor:
        spec, encoding = self._reader.specs[name], self._reader.encodings.get(name)
        stored = read_rows(self._reader, name, 0, spec.rows)
        values = stored if encoding is None else encoding.decode_rows(stored, 0, torch.float32)
        return values.to(torch.promote_types(values.dtype, wanted)).reshape(spec.shape)

    def _needs_amax(self, job: Job) -> bool:
        if job.encode:
            return job.encode.granularity == "tensor"
        return self._weight_amax and job.row.gemm

    def _put(self, name: str, row: int, values: Tensor) -> None:
        write_rows(self._writer, name, row, values)

    def _values(self, name: str, row: int, rows: int) -> Tensor:
        """Rows as `[rows, columns]`, FP8 codes decoded to FP32; in a buffer that the next call uses again."""
        spec = self._reader.specs[name]
        into = _view(self._read_buffer, spec.dtype, rows, spec.columns)
        stored = read_rows(self._reader, name, row, rows, into)
        encoding = self._reader.encodings.get(name)
        return stored if encoding is None else encoding.decode_rows(stored, row, torch.float32)

    def _pieces(self, name: str, row: int, rows: int) -> Iterator[tuple[int, Tensor]]:
        """The values of a run of rows, piece by piece, each with the number of rows before it."""
        step = max(1, BUFFER // (4 * self._reader.specs[name].columns))  # 4 bytes: the widest dtype on the way
        for start in range(0, rows, step):
            yield start, self._values(name, row + start, min(step, rows - start))

    def _amax(self, names: tuple[str, ...]) -> Tensor:
        pieces = (values for name in names for _, values in self._pieces(name, 0, self._reader.specs[name].rows))
        return torch.stack([numerics.amax(values) for values in pieces]).amax()

    def _move(self, segment: Segment, read: str, seen: list[Tensor] | None) -> None:
        """`seen` takes the amax of each piece, while it is at hand."""
        dtype = self._writer.specs[segment.write].dtype
        for start, values in self._pieces(read, segment.read_row, segment.rows):
            if seen is not None:
                seen.append(numerics.amax(values))
            if values.dtype != dtype:
                values = _view(self._write_buffer, dtype, *values.shape).copy_(values)
            self._put(segment.write, segment.write_row + start, values)

    def _zero(self, segment: Segment) -> None:
        spec = self._writer.specs[segment.write]
        step = max(1, BUFFER // (spec.columns * spec.dtype.itemsize))
        for start in range(0, segment.rows, step):
            zeros = _view(self._write_buffer, spec.dtype, min(step, segment.rows - start), spec.columns).zero_()
            self._put(segment.write, segment.write_row + start, zeros)

    def _encode(self, segment: Segment, read: str, encode: Encode, amax: Tensor | None) -> None:
        for start, values in self._pieces(read, segment.read_row, segment.rows):
            self._encode_rows(segment.write, segment.write_row + start, values, encode, amax)

    def _encode_rows(self, name: str, row: int, values: Tensor, encode: Encode, amax: Tensor | None) -> None:
        dtype = self._writer.specs[name].dtype
        scale_inv = numerics.scale_inv(numerics.row_amax(values) if amax is None else amax, dtype)
        codes = _view(self._write_buffer, dtype, *values.shape)
        numerics.encode_by_scale_inv(values, scale_inv, codes, self._scratch)
        self._put(name, row, codes)
        if amax is None:
            self._put(encode.weight_scales[name], row, scale_inv)

    def _write_scales(self, encode: Encode, amax: Tensor | None) -> None:
        if amax is not None:
            for weight, name in encode.weight_scales.items():
                scale_inv = numerics.scale_inv(amax, self._writer.specs[weight].dtype)
                self._put(name, 0, scale_inv.reshape(1, 1))
        for name, value in encode.input_scales.items():
            self._put(name, 0, torch.tensor([[value]]))

    def _check_equal(self, name: str, copy: str) -> None:
        for start, values in self._pieces(name, 0, self._reader.specs[name].rows):
            kept = values.clone()
            if not torch.equal(kept, self._values(copy, start, len(kept))):
                raise DamagedCheckpoint(
                    f"`{copy}` is stored and should be a copy of `{name}`, but differs",
                    do="If the two are meant to differ, set tie_word_embeddings to false in config.json.",
                )

    def _check_zero(self, job: Job) -> None:
        for name in job.reads:
            if any(bool(values.any()) for _, values in self._pieces(name, 0, self._reader.specs[name].rows)):
                raise ShapeMismatch(
                    f"`{name}` is not zero, and the target has no place for it",
                    do="Switch the bias on in the config (attention_bias, mlp_bias).",
                )


class Checker(Worker):
    """Does jobs again, and compares instead of writing."""

    def _put(self, name: str, row: int, values: Tensor) -> None:
        check_rows(self._writer, name, row, values)

    def check(self, job: Job) -> dict[str, str]:
        """The SHA-256 of each tensor's row-major bytes, by name. Raises DamagedCheckpoint."""
        self.do(job)
        return {name: self._checksum(name) for name in written(job)}

    def _checksum(self, name: str) -> str:
        spec, total = self._writer.specs[name], sha256()
        step = max(1, BUFFER // (spec.columns * spec.dtype.itemsize))
        for row in range(0, spec.rows, step):
            rows = min(step, spec.rows - row)
            into = _view(self._read_buffer, spec.dtype, rows, spec.columns)
            total.update(read_rows(self._writer, name, row, rows, into).view(torch.uint8).numpy().data)
        return total.hexdigest()


def _view(buffer: Tensor, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """The start of a byte buffer as `[rows, columns]`; fresh memory for a single row that is too long for it."""
    size = rows * columns * dtype.itemsize
    if size > buffer.numel():
        buffer = torch.empty(size, dtype=torch.uint8)
    return buffer[:size].view(dtype).view(rows, columns)
