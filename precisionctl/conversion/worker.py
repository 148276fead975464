"""One job at a time: read, map, cast, write, piece by piece through a few buffers of its own.

A job is lowered to segments, so memory does not grow with the model. Where source and target hold the same dtype,
bytes are copied and no number is looked at. Otherwise each piece is decoded, rounded or encoded on its way.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from math import prod
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from precisionctl.checkpoints.base import Chunked, check_rows, read_rows, rows_held, write_rows
from precisionctl.conversion.unchanged_codes import passed_on
from precisionctl.errors import DamagedCheckpoint, PrecisionError, ShapeMismatch
from precisionctl.fp8 import numerics
from precisionctl.fp8.blocks import Fit, share
from precisionctl.fp8.encoding import Encoding, grid_shape
from precisionctl.planning.encode import Encode
from precisionctl.planning.plan import Job, Plan
from precisionctl.planning.segments import Segment, lower

BUFFER = 4 << 20
"""Bytes moved at a time. With 1 MiB an export took a tenth longer, for the Python around each piece; larger ones gain
nothing more and leave a core's own cache."""


Piece = tuple[str, int, Tensor]
"""The tensor to write, its first row, and values `[rows, columns]` in a buffer that the next piece uses again."""


class Source(Chunked, Protocol):
    """The part of a Reader that a run needs."""

    @property
    def encodings(self) -> Mapping[str, Encoding]: ...


def written(job: Job) -> Sequence[str]:
    """The tensors that a job writes, its scales included."""
    return (*job.writes, *job.encode.weight_scales.values(), *job.encode.input_scales) if job.encode else job.writes


_FIT = 17
"""Bytes that a Fit holds for each block of a tensor: amax, candidate, misfit and scale in FP32, and whether it fits."""


def held_bytes(plan: Plan) -> int:
    """The most memory that a worker holds for this plan: its buffers, or a row of a tensor that is longer; a row
    of the table that does more than move, as read and as made, in FP32 at worst; and where it encodes or decodes, what
    a piece becomes on the way there and back, and the grids of scales."""
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
    recoded = [6 * BUFFER + _FIT * _blocks(plan, job.encode) for job in plan.jobs if job.encode]
    return 2 * max(BUFFER, *rows) + 4 * numerics.PIECE + max(computed, default=0) + max(recoded, default=0)


def _blocks(plan: Plan, encode: Encode) -> int:
    """The blocks with a scale in the tensors that a job encodes."""
    specs = ((plan.targets[name], block) for name, block in encode.blocks.items())
    return sum(prod(grid_shape(spec.rows, spec.columns, block)) for spec, block in specs)


class Worker:
    """Does jobs of a plan, one after the other, with memory for one piece: bytes as read, bytes to be written, and
    FP32 numbers under way."""

    def __init__(
        self,
        plan: Plan,
        reader: Source,
        writer: Chunked,
        weight_amax: bool = False,
        carried: Mapping[str, Encoding] = MappingProxyType({}),
    ) -> None:
        """`carried` is how values that are to be encoded were coded before, by the target's names."""
        self._plan = plan
        self._carried = carried
        self._reader = reader
        self._writer = writer
        self._weight_amax = weight_amax
        self._read_buffer = torch.empty(BUFFER, dtype=torch.uint8)
        self._write_buffer = torch.empty(BUFFER, dtype=torch.uint8)
        self._scratch = torch.empty(numerics.PIECE)

    def do(self, job: Job) -> dict[str, float]:
        """Returns what was found out: the amax of the job's weight, where it was asked for; and of each
        tensor that could not keep the scales it had, how many codes are other ones now."""
        for copy in job.copies:
            self._check_equal(job.reads[0], copy)
        if not job.writes:
            self._check_zero(job)
            return {}
        if job.reads and self._plan.source != self._plan.target and not job.row.moves(self._plan.model):
            return self._compute(job)
        reads = {name: self._reader.specs[name].rows for name in job.reads}
        segments = lower(job.row, self._plan.model, self._plan.source, self._plan.target, reads, job.writes)
        if job.encode and self._pass_on(job.encode, segments):
            return {}
        if job.encode:
            return self._encode(job.encode, lambda: (piece for segment in segments for piece in self._moved(segment)))
        seen: list[Tensor] = []
        if not self._wants_amax(job):  # which is of all rows, wherever they go
            segments = [part for segment in segments for part in self._here(segment)]
        for segment in segments:
            for name, row, values in self._moved(segment):
                if self._wants_amax(job):
                    seen.append(numerics.amax(values))  # while it is at hand
                self._put_values(name, row, values)
        return self._found(job, seen)

    def _here(self, segment: Segment) -> Iterator[Segment]:
        """What of a segment the target takes: of one that is cut for several ranks, not all."""
        for here in rows_held(self._writer, segment.write):
            first = max(segment.write_row, here.start)
            rows = min(segment.write_row + segment.rows, here.stop) - first
            if rows > 0:
                read_row = segment.read_row + first - segment.write_row
                yield replace(segment, read_row=read_row, write_row=first, rows=rows)

    def _compute(self, job: Job) -> dict[str, float]:
        """A row that does more than move: its tensors whole, in the wider dtype of the two sides."""
        model, wanted = self._plan.model, self._writer.specs[job.writes[0]].dtype
        parts = [self._whole(name, torch.float32 if job.encode else wanted) for name in job.reads]
        made = (job.row.merge(parts, model),) if self._plan.target == "megatron" else job.row.split(parts[0], model)
        rows = [
            (name, 0, tensor.reshape(self._writer.specs[name].rows, -1))
            for name, tensor in zip(job.writes, made, strict=True)
        ]
        if job.encode:
            return self._encode(job.encode, lambda: rows)
        for name, row, values in rows:
            self._put_values(name, row, values)
        return (
            {job.name: float(torch.stack([numerics.amax(part) for part in made]).amax())}
            if self._wants_amax(job)
            else {}
        )

    def _found(self, job: Job, amaxes: list[Tensor]) -> dict[str, float]:
        return {job.name: float(torch.stack(amaxes).amax())} if amaxes else {}

    def _wants_amax(self, job: Job) -> bool:
        return self._weight_amax and job.row.gemm

    def _whole(self, name: str, wanted: torch.dtype) -> Tensor:
        spec, encoding = self._reader.specs[name], self._reader.encodings.get(name)
        stored = read_rows(self._reader, name, 0, spec.rows)
        values = stored if encoding is None else encoding.decode_rows(stored, 0, torch.float32)
        return values.to(torch.promote_types(values.dtype, wanted)).reshape(spec.shape)

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

    def _moved(self, segment: Segment) -> Iterator[Piece]:
        """What a segment writes, piece by piece."""
        if segment.read is not None:
            for start, values in self._pieces(segment.read, segment.read_row, segment.rows):
                yield segment.write, segment.write_row + start, values
            return
        spec = self._writer.specs[segment.write]
        step = max(1, BUFFER // (spec.columns * 4))
        for start in range(0, segment.rows, step):
            zeros = _view(self._read_buffer, torch.float32, min(step, segment.rows - start), spec.columns).zero_()
            yield segment.write, segment.write_row + start, zeros

    def _put_values(self, name: str, row: int, values: Tensor) -> None:
        dtype = self._writer.specs[name].dtype
        if values.dtype != dtype:
            values = _view(self._write_buffer, dtype, *values.shape).copy_(values)
        self._put(name, row, values)

    def _pass_on(self, encode: Encode, segments: Sequence[Segment]) -> bool:
        """Copy codes that are what is wanted already; False where some are not."""
        where = [(segment.read, segment.read_row) for segment in segments]
        if where != [(segment.write, segment.write_row) for segment in segments]:
            return False
        if not encode.blocks or {segment.write for segment in segments} != encode.blocks.keys():
            return False
        grids = passed_on(encode, self._reader.encodings, self._carried, self._writer.specs)
        if grids is None:
            return False
        for name, grid in grids.items():
            self._put_scales(encode.weight_scales[name], grid)
        for segment in segments:
            spec = self._reader.specs[segment.write]
            step = max(1, BUFFER // spec.columns)
            for row in range(segment.write_row, segment.write_row + segment.rows, step):
                rows = min(step, segment.write_row + segment.rows - row)
                into = _view(self._read_buffer, spec.dtype, rows, spec.columns)
                self._put(segment.write, row, read_rows(self._reader, segment.write, row, rows, into))
        self._put_constants(encode)
        return True

    def _put_constants(self, encode: Encode) -> None:
        for name, value in encode.input_scales.items():
            self._put(name, 0, torch.tensor([[value]]).to(self._writer.specs[name].dtype))

    def _put_scales(self, name: str, grid: Tensor) -> None:
        """A grid of scales, FP32 or as it is stored: exponents as bytes."""
        spec = self._writer.specs[name]
        stored = grid.to(torch.float8_e8m0fnu if spec.dtype == torch.uint8 else spec.dtype).contiguous()
        self._put(name, 0, stored.view(spec.dtype).reshape(spec.rows, spec.columns))

    def _encode(self, encode: Encode, pieces: Callable[[], Iterable[Piece]]) -> dict[str, float]:
        """Two passes: what scales there must be, then the codes. One is enough where each row has its own scale, and
        none is carried."""
        fits = {
            name: Fit(spec.rows, spec.columns, block, spec.dtype, self._carried.get(name))
            for name, block in encode.blocks.items()
            if (spec := self._writer.specs[name]) and not self._is_by_row(name, encode)
        }
        for name, row, values in pieces() if fits else ():
            if name in fits:
                fits[name].see(values, row)
        for name, fit in fits.items():
            _check_finite(name, fit.amax)
        if encode.shared:
            share([*fits.values(), *self._alongside(encode)])
        made = {name: self._made(fit, encode.weight_scales[name], encode.power_of_2) for name, fit in fits.items()}
        changed = dict.fromkeys((name for name, fit in fits.items() if fit.carried and not fit.fits.all()), 0.0)
        for name, row, values in pieces():
            if name not in encode.blocks:
                self._put_values(name, row, values)
                continue
            encoding = made.get(name) or self._by_row(name, row, values, encode)
            codes = _view(self._write_buffer, encoding.dtype, *values.shape)
            encoding.encode_rows(values, row if name in made else 0, codes, self._scratch)
            if name in changed:
                changed[name] += fits[name].changed(values, codes, row)
            self._put(name, row, codes)
        self._put_constants(encode)
        return changed

    def _alongside(self, encode: Encode) -> Iterator[Fit]:
        """What the weights that share the scale, and that other jobs encode, say of it."""
        for name, source in encode.alongside.items():
            spec = self._writer.specs[name]
            fit = Fit(spec.rows, spec.columns, (spec.rows, spec.columns), spec.dtype, self._carried.get(name))
            for row, values in self._pieces(source, 0, spec.rows):
                fit.see(values, row)
            yield fit

    def _is_by_row(self, name: str, encode: Encode) -> bool:
        """Whether each row has a scale of its own, FP32 and none that is carried."""
        of_a_row = encode.blocks[name] == (1, self._writer.specs[name].columns) and not encode.power_of_2
        fp32 = self._writer.specs[encode.weight_scales[name]].dtype == torch.float32
        return of_a_row and fp32 and name not in self._carried

    def _made(self, fit: Fit, scales: str, power_of_2: bool) -> Encoding:
        """How to encode, after one pass; the scales are written."""
        spec = self._writer.specs[scales]
        exponents = spec.dtype == torch.uint8
        encoding = fit.encoding(torch.float8_e8m0fnu if exponents else spec.dtype, power_of_2=power_of_2)
        self._put_scales(scales, encoding.scale_inv)
        return encoding

    def _by_row(self, name: str, row: int, values: Tensor, encode: Encode) -> Encoding:
        """How to encode rows that each have the scale of their own amax, which is written."""
        dtype = self._writer.specs[name].dtype
        amax = numerics.row_amax(values, self._scratch)
        _check_finite(name, amax)
        scale_inv = numerics.scale_inv(amax, dtype)
        self._put(encode.weight_scales[name], row, scale_inv)
        return Encoding(dtype, scale_inv, (1, values.shape[1]))

    def _check_equal(self, name: str, copy: str) -> None:
        for start, values in self._pieces(name, 0, self._reader.specs[name].rows):
            kept = values.clone()
            other = self._values(copy, start, len(kept))
            if not bool(((kept == other) | (kept.isnan() & other.isnan())).all()):
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


def _check_finite(name: str, amax: Tensor) -> None:
    """Raises PrecisionError for the amax of an infinite weight, which no scale brings into FP8."""
    if bool(amax.isinf().any()):
        raise PrecisionError(
            f"`{name}` holds an infinite weight, which no FP8 scale is for",
            do="Is the checkpoint sound? `keep_bf16` in a --recipe leaves the module as it is.",
        )


def _view(buffer: Tensor, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """The start of a byte buffer as `[rows, columns]`; fresh memory for a single row that is too long for it."""
    size = rows * columns * dtype.itemsize
    if size > buffer.numel():
        buffer = torch.empty(size, dtype=torch.uint8)
    return buffer[:size].view(dtype).view(rows, columns)
