"""Do one job at a time: read, map, cast, write, piece by piece.

A job is lowered to segments (planning/segments.py), so memory does not grow with the model. If source and target have
the same dtype, bytes are copied; otherwise each piece is decoded, rounded or encoded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from precisionctl.checkpoints.base import HasFormerCodes, TensorSource
from precisionctl.checkpoints.chunks import (
    Bytes,
    Chunk,
    Chunked,
    check_rows,
    read_bytes,
    read_rows,
    rows_held,
    whole,
    write_rows,
)
from precisionctl.codes import numerics
from precisionctl.codes.elements import CodesInRows, KeptCodes
from precisionctl.codes.encoding import Encoding
from precisionctl.conversion.buffers import WIDEST, Buffers
from precisionctl.conversion.encoder import Encoder, ValuePiece
from precisionctl.conversion.outcome import Outcome
from precisionctl.conversion.unchanged_codes import encodings_if_unchanged
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, ShapeMismatch
from precisionctl.param import TensorSpec
from precisionctl.planning.plan import Job, JobCodes, Plan
from precisionctl.planning.segments import Segment, lower
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Nowhere:
    """A target for workers that compute tensors without writing them: it takes all rows, and has no place for them."""

    specs: Mapping[str, TensorSpec]

    def chunks(self, name: str) -> Sequence[Chunk]:
        return [Chunk(whole(self.specs[name]), Path(os.devnull))]


class Worker:
    """Does jobs of a plan one after the other, with no more than a piece of a tensor in memory (except in jobs that
    compute).

    `collect_weight_amax` collects the amax of each FP8 GEMM's weight. `former` are the encodings that values which are
    to be encoded had before, by the target's names.
    """

    def __init__(
        self,
        plan: Plan,
        reader: TensorSource,
        writer: Chunked,
        collect_weight_amax: bool = False,
        former: Mapping[str, Encoding] = MappingProxyType({}),
    ) -> None:
        self._plan, self._reader, self._writer = plan, reader, writer
        self._collect_weight_amax, self._former = collect_weight_amax, former
        self._buffers = Buffers()
        self._made: tuple[str, list[ValuePiece]] | None = None
        """The last job whose values were computed, and these."""
        former_codes = reader.former_codes if isinstance(reader, HasFormerCodes) else None
        self._is_written = not isinstance(writer, Nowhere)  # else it is looked at, and may be anything
        self._encoder = Encoder(
            writer.specs,
            former,
            self._buffers,
            self._put,
            self._values_of,
            former_codes,
            refuses_infinity=self._is_written,
        )

    def do(self, job: Job) -> Outcome:
        """Do a job. Returns what was found out about its tensors.

        Raises DamagedCheckpoint for copies of a tensor that differ, for integers out of range and for codes that are
        infinite by their scales, ShapeMismatch for a bias that the target has no place for and that is not zero,
        PrecisionError for an infinite weight to encode and for a number that would be infinite in the target's dtype,
        and as `read_rows`.
        """
        self._encoder.outcome = Outcome()
        for copy in job.copies:
            self._check_equal(job.reads[0], copy)
        if job.row.integers_below:
            self._check_below(job, attrgetter(job.row.integers_below)(self._plan.model))
        if not job.writes:
            self._check_zero(job)
        elif isinstance(self._writer.specs[job.writes[0]].packing, KeptCodes):
            self._move_codes(job)
        elif job.codes:
            if self._plan.computes(job) or not self._copy_codes(job.codes, self._segments(job)):
                self._encoder.encode(job)
        elif self._plan.computes(job):
            self._compute(job)
        elif self._only_copies(job):
            self._copy(self._segments(job))
        else:
            self._move(job, self._segments(job))
        self._made = None
        return self._encoder.outcome

    def _values_of(self, job: Job) -> Iterable[ValuePiece]:
        """The values that a job writes before they become codes, piece by piece; computed ones are kept until another
        job's are asked for."""
        if not self._plan.computes(job):
            return (piece for segment in self._segments(job) for piece in self._moved(segment))
        if self._made is None or self._made[0] != job.name:
            self._made = None  # first: there is room for those of one job
            self._made = job.name, self._computed(job, DType.float32)
        return self._made[1]

    def _segments(self, job: Job) -> list[Segment]:
        """The copies that do a job whose row only moves."""
        reads = {name: self._reader.specs[name].rows for name in job.reads}
        return lower(job.row, self._plan.model, self._plan.from_layout, self._plan.to_layout, reads, job.writes)

    def needs_torch(self, job: Job) -> bool:
        """Whether a job does more than copy bytes between files."""
        if job.copies or job.row.integers_below or not job.writes or not self._only_copies(job):
            return True
        chunks = chain(*map(self._reader.chunks, job.reads), *map(self._writer.chunks, job.writes))
        return not all(isinstance(chunk.place, Path) for chunk in chunks)

    def _only_copies(self, job: Job) -> bool:
        """Whether a job only moves rows, and their bytes stay the same."""
        if job.codes or job.factors or self._collects_amax(job) or self._plan.computes(job):
            return False
        reads, writes = self._reader.specs, self._writer.specs
        dtypes = {*(reads[name].dtype for name in job.reads), *(writes[name].dtype for name in job.writes)}
        return len(dtypes) == 1 and not any(name in self._reader.encodings for name in job.reads)

    def _put(self, name: str, row: int, values: Tensor | Bytes) -> None:
        write_rows(self._writer, name, row, values)

    def _copy(self, segments: Iterable[Segment]) -> None:
        """Copy rows whose bytes stay the same."""
        for segment in (part for each in segments for part in self._held(each)):
            spec = self._writer.specs[segment.write]
            row_bytes = spec.width * spec.dtype.itemsize
            for row, rows in self._buffers.pieces(segment.write_row, segment.rows, row_bytes):
                data = self._buffers.to_copy(rows, row_bytes)
                if segment.read is None:
                    data[:] = 0
                else:
                    read_bytes(self._reader, segment.read, segment.read_row + row - segment.write_row, rows, data)
                self._put(segment.write, row, data)

    def _compute(self, job: Job) -> None:
        """Do a job whose row computes and does not only move: on whole tensors, in the wider dtype of the two sides."""
        specs = [self._writer.specs[name] for name in job.writes]
        cast_in_rows = any(isinstance(spec.packing, CodesInRows) for spec in specs)
        made = self._computed(job, DType.float32 if cast_in_rows else specs[0].dtype)
        for name, row, values in made:
            self._encoder.put_values(name, row, values)
        if self._collects_amax(job):
            self._encoder.outcome.amax[job.name] = max(float(numerics.amax(part)) for _, _, part in made)

    def _computed(self, job: Job, wanted: DType) -> list[ValuePiece]:
        """The whole tensors that a job computes."""
        made = self._plan.compute(job, [self._whole(name, wanted) for name in job.reads])
        return [
            (name, 0, tensor.reshape(self._writer.specs[name].rows, -1))
            for name, tensor in zip(job.writes, made, strict=True)
        ]

    def _move(self, job: Job, segments: Sequence[Segment]) -> None:
        """Round values to the target's dtype, or look at them on their way."""
        amaxes: list[Tensor] = []
        if not self._collects_amax(job):  # the amax needs all rows, also those that this target does not take
            segments = [part for segment in segments for part in self._held(segment)]
        for segment in segments:
            for name, row, values in self._moved(segment):
                if self._collects_amax(job):
                    amaxes.append(numerics.amax(values))
                if name in job.factors:
                    values = job.factors[name].multiplied(values, row)
                self._encoder.put_values(name, row, values)
        if amaxes:
            self._encoder.outcome.amax[job.name] = float(torch.stack(amaxes).amax())

    def _move_codes(self, job: Job) -> None:
        """Write codes as they are, with the scales of their groups, as rows, which are moved."""
        if self._plan.computes(job):
            whole = [self._rows_of_codes(job, name, 0, self._reader.specs[name].rows) for name in job.reads]
            for name, rows in zip(job.writes, self._plan.compute(job, whole), strict=True):
                self._put(name, 0, rows)
            return
        for segment in self._segments(job):
            assert segment.read is not None
            before, width = segment.write_row - segment.read_row, self._reader.specs[segment.read].width
            for row, count in self._buffers.pieces(segment.read_row, segment.rows, width):
                self._put(segment.write, row + before, self._rows_of_codes(job, segment.read, row, count))

    def _rows_of_codes(self, job: Job, name: str, row: int, rows: int) -> Tensor:
        """Rows of codes with the scales of their groups, as bytes in the order of the job's target."""
        packing = self._writer.specs[job.writes[0]].packing
        assert isinstance(packing, KeptCodes)
        spec = self._reader.specs[name]
        scales = self._reader.encodings[name].scale_inv[row : row + rows].view(torch.uint8)
        codes = read_rows(self._reader, name, row, rows, self._buffers.to_read(spec.dtype, rows, spec.width))
        return packing.rows_of(codes.view(torch.uint8), scales)

    def _collects_amax(self, job: Job) -> bool:
        return self._collect_weight_amax and job.row.gemm

    def _held(self, segment: Segment) -> Iterator[Segment]:
        """The parts of a segment that this target holds: not all of its rows if ranks share the tensor."""
        for held in rows_held(self._writer, segment.write):
            first = max(segment.write_row, held.start)
            rows = min(segment.write_row + segment.rows, held.stop) - first
            if rows > 0:
                read_row = segment.read_row + first - segment.write_row
                yield replace(segment, read_row=read_row, write_row=first, rows=rows)

    def _copy_codes(self, codes: JobCodes, segments: Sequence[Segment]) -> bool:
        """Copy a job's codes and scales if they are already the ones to write. Otherwise do nothing and return
        False."""
        encodings = encodings_if_unchanged(codes, segments, self._reader.encodings, self._former, self._writer.specs)
        if encodings is None:
            return False
        for name, encoding in encodings.items():
            self._encoder.put_grid(codes.weights[name], encoding)
            self._encoder.put_further(name, codes.weights[name], encoding)
        self._copy(segments)
        self._encoder.put_known(codes)
        return True

    def _moved(self, segment: Segment) -> Iterator[ValuePiece]:
        """The values that a segment writes, piece by piece."""
        if segment.read is not None:
            for start, values in self._pieces(segment.read, segment.read_row, segment.rows):
                yield segment.write, segment.write_row + start, values
            return
        columns = self._writer.specs[segment.write].columns
        for row, rows in self._buffers.pieces(segment.write_row, segment.rows, WIDEST * columns):
            yield segment.write, row, self._buffers.to_read(DType.float32, rows, columns).zero_()

    def _pieces(self, name: str, row: int, rows: int) -> Iterator[tuple[int, Tensor]]:
        """The values of rows `[row, row + rows)`, piece by piece, each with the number of rows before it."""
        for first, count in self._buffers.pieces(row, rows, WIDEST * self._reader.specs[name].columns):
            yield first - row, self._read_values(name, first, count)

    def _read_values(self, name: str, row: int, rows: int) -> Tensor:
        """Rows as `[rows, columns]`, codes decoded to FP32; in a buffer that the next call uses again."""
        spec = self._reader.specs[name]
        stored = read_rows(self._reader, name, row, rows, self._buffers.to_read(spec.dtype, rows, spec.width))
        encoding = self._reader.encodings.get(name)
        if encoding is None:
            return stored
        into = self._buffers.to_decode(rows, spec.columns)
        values = encoding.decode_rows(stored, row, into, self._buffers.scratch)
        if self._is_written and numerics.has_infinity(values):
            what = f"`{name}` has values that are infinite, by its codes and their scales"
            raise DamagedCheckpoint(what, do="Copy the files again, or ask where they come from.")
        return values

    def _whole(self, name: str, wanted: DType) -> Tensor:
        """A whole tensor in its shape, in a dtype that holds both its own and `wanted`; codes decoded to `wanted`."""
        spec = self._reader.specs[name]
        dtype = wanted if name in self._reader.encodings else spec.dtype.promoted(wanted)
        values = torch.empty(spec.rows, spec.columns, dtype=dtype.torch)
        for row, piece in self._pieces(name, 0, spec.rows):
            values[row : row + len(piece)] = piece
        return values.reshape(spec.shape)

    def _check_equal(self, name: str, copy: str) -> None:
        """Raise DamagedCheckpoint if a copy of a tensor (a tied embedding) differs from it."""
        for start, values in self._pieces(name, 0, self._reader.specs[name].rows):
            kept = values.clone()
            other = self._read_values(copy, start, len(kept))
            if not bool(((kept == other) | (kept.isnan() & other.isnan())).all()):
                raise DamagedCheckpoint(
                    f"`{copy}` is stored and should be a copy of `{name}`, but differs",
                    do="If the two are meant to differ, set tie_word_embeddings to false in config.json.",
                )

    def _check_below(self, job: Job, limit: int) -> None:
        """Raise DamagedCheckpoint if a table has a negative number, or one that is not below `limit`."""
        for name in job.reads:
            for _, values in self._pieces(name, 0, self._reader.specs[name].rows):
                if not bool(((values >= 0) & (values < limit)).all()):
                    least, most = (each.item() for each in values.aminmax())
                    raise DamagedCheckpoint(f"`{name}` has numbers from {least} to {most}, not from 0 to {limit - 1}")

    def _check_zero(self, job: Job) -> None:
        """Raise ShapeMismatch if tensors that the target has no place for are not zero."""
        for name in job.reads:
            if any(bool(values.any()) for _, values in self._pieces(name, 0, self._reader.specs[name].rows)):
                raise ShapeMismatch(
                    f"`{name}` is not zero, and the target has no place for it",
                    do="Switch the bias on in the config (attention_bias, mlp_bias).",
                )


class Checker(Worker):
    """Does jobs again and, instead of writing, compares the results with what the target holds."""

    def _put(self, name: str, row: int, values: Tensor | Bytes) -> None:
        check_rows(self._writer, name, row, values)

    def check(self, job: Job) -> dict[str, str]:
        """Check a job. Returns the SHA-256 of each tensor's row-major bytes, by name. Raises DamagedCheckpoint for a
        difference."""
        self.do(job)
        checksums = {}
        for name in job.outputs:
            spec, total = self._writer.specs[name], sha256()
            row_bytes = spec.width * spec.dtype.itemsize
            for row, rows in self._buffers.pieces(0, spec.rows, row_bytes):
                total.update(read_bytes(self._writer, name, row, rows, self._buffers.to_copy(rows, row_bytes)).data)
            checksums[name] = total.hexdigest()
        return checksums
