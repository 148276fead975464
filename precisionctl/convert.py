"""The only loop over tensors: read, map, cast, write, job by job.

A job is lowered to segments, and a segment is done in pieces through a worker's own buffers, so memory
does not grow with the model. Where source and target hold the same dtype, bytes are copied and no number
is looked at. Otherwise each piece is decoded, rounded or encoded on its way.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from precisionctl.cast import Encode
from precisionctl.checkpoints.base import Chunked, read_rows, sync, write_rows
from precisionctl.errors import DamagedCheckpoint, ShapeMismatch
from precisionctl.fp8 import numerics
from precisionctl.fp8.encoding import Encoding
from precisionctl.journal import Journal
from precisionctl.lower import Segment, lower
from precisionctl.plan import Job, Plan

BUFFER = 1 << 20
"""Bytes moved at a time: what was read is still in a core's own cache when it is written. With 8 MiB the kernel's
half of a copy took twice as long while the other core was busy."""

SYNC_EVERY = 512 << 20
"""Bytes between two records in the journal: what a crash of the machine can cost."""

OnBytes = Callable[[int], None]


class Source(Chunked, Protocol):
    """The part of a Reader that a run needs."""

    @property
    def encodings(self) -> Mapping[str, Encoding]: ...


class Target(Chunked, Protocol):
    """The part of a Writer that a run needs."""

    def lay_out(self) -> None: ...


def run(
    plan: Plan,
    reader: Source,
    writer: Target,
    *,
    journal: Journal | None = None,
    weight_amax: bool = False,
    workers: int = 1,
    on_bytes: OnBytes = lambda count: None,
) -> dict[str, float]:
    """Write every target of `plan` but what the journal says is done; `finish` and commit are the caller's.

    Returns the largest magnitude of each FP8 GEMM's weight, by module, if `weight_amax` asks for it. `on_bytes`
    hears of bytes written; first of those that were written before.
    """
    files = {chunk.place for name in plan.targets for chunk in writer.chunks(name) if isinstance(chunk.place, Path)}
    done = journal.done if journal and all(file.is_file() for file in files) else set()  # a lost file was not done
    writer.lay_out()
    on_bytes(sum(nbytes(job, plan) for job in plan.jobs if job.name in done))
    todo = [job for job in plan.jobs if job.name not in done]
    worker = _Worker(plan, reader, writer, weight_amax)
    found: dict[str, float] = dict(journal.amax) if journal else {}
    with _one_torch_thread(), ThreadPoolExecutor(workers) as pool:
        for batch in _batches(pool, worker, todo, on_bytes):
            amax = {job.module: value for job, value in batch if value is not None}
            found |= amax
            if journal:
                for file in files:
                    sync(file)
                journal.record([job.name for job, _ in batch], amax)
    return found


def nbytes(job: Job, plan: Plan) -> int:
    """Bytes that a job writes, its scales included."""
    scales = (*job.encode.weight_scales.values(), *job.encode.input_scales) if job.encode else ()
    return sum(plan.targets[name].nbytes for name in (*job.writes, *scales))


def _batches(
    pool: ThreadPoolExecutor, worker: "_Worker", jobs: list[Job], on_bytes: OnBytes
) -> Iterator[list[tuple[Job, float | None]]]:
    """Run the jobs; yield what is done each time that SYNC_EVERY bytes have been written, and at the end."""
    futures: dict[Future[float | None], Job] = {pool.submit(worker.do, job): job for job in jobs}
    batch: list[tuple[Job, float | None]] = []
    written = 0
    try:
        for future in as_completed(futures):
            job = futures[future]
            batch.append((job, future.result()))
            on_bytes(nbytes(job, worker.plan))
            written += nbytes(job, worker.plan)
            if written >= SYNC_EVERY:
                yield batch
                batch, written = [], 0
        yield batch
    finally:
        for future in futures:
            future.cancel()


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Workers are the parallelism; torch's own threads would only fight them over small pieces."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Buffers(threading.local):
    """A worker's memory, all of it: bytes as read, bytes to be written, and FP32 numbers under way."""

    def __init__(self) -> None:
        self.read = torch.empty(BUFFER, dtype=torch.uint8)
        self.write = torch.empty(BUFFER, dtype=torch.uint8)
        self.scratch = torch.empty(numerics.PIECE)


class _Worker:
    """Does one job at a time in each thread that calls it."""

    def __init__(self, plan: Plan, reader: Source, writer: Target, weight_amax: bool) -> None:
        self.plan = plan
        self._reader = reader
        self._writer = writer
        self._weight_amax = weight_amax
        self._buffers = _Buffers()

    def do(self, job: Job) -> float | None:
        """Returns the amax of the job's weight where it was asked for or needed."""
        for copy in job.copies:
            self._check_equal(job.reads[0], copy)
        if not job.writes:
            self._check_zero(job)
            return None
        segments = lower(job.row, self.plan.model, self.plan.source, self.plan.target, job.reads, job.writes)
        amax = self._amax(job.reads) if self._needs_amax(job) else None
        for segment in segments:
            if segment.read is None:
                self._zero(segment)
            elif job.encode:
                self._encode(segment, segment.read, job.encode, amax)
            else:
                self._move(segment, segment.read)
        if job.encode:
            self._write_scales(job.encode, amax)
        return None if amax is None else float(amax)

    def _needs_amax(self, job: Job) -> bool:
        if job.encode:
            return job.encode.granularity == "tensor"
        return self._weight_amax and job.row.gemm

    def _values(self, name: str, row: int, rows: int) -> Tensor:
        """Rows as `[rows, columns]`, FP8 codes decoded to FP32; in a buffer that the next call uses again."""
        spec = self._reader.specs[name]
        into = _view(self._buffers.read, spec.dtype, rows, spec.columns)
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

    def _move(self, segment: Segment, read: str) -> None:
        dtype = self._writer.specs[segment.write].dtype
        for start, values in self._pieces(read, segment.read_row, segment.rows):
            if values.dtype != dtype:
                values = _view(self._buffers.write, dtype, *values.shape).copy_(values)
            write_rows(self._writer, segment.write, segment.write_row + start, values)

    def _zero(self, segment: Segment) -> None:
        spec = self._writer.specs[segment.write]
        step = max(1, BUFFER // (spec.columns * spec.dtype.itemsize))
        for start in range(0, segment.rows, step):
            zeros = _view(self._buffers.write, spec.dtype, min(step, segment.rows - start), spec.columns).zero_()
            write_rows(self._writer, segment.write, segment.write_row + start, zeros)

    def _encode(self, segment: Segment, read: str, encode: Encode, amax: Tensor | None) -> None:
        dtype = self._writer.specs[segment.write].dtype
        for start, values in self._pieces(read, segment.read_row, segment.rows):
            row = segment.write_row + start
            scale_inv = numerics.scale_inv(numerics.row_amax(values) if amax is None else amax, dtype)
            codes = _view(self._buffers.write, dtype, *values.shape)
            numerics.encode_by_scale_inv(values, scale_inv, codes, self._buffers.scratch)
            write_rows(self._writer, segment.write, row, codes)
            if amax is None:
                write_rows(self._writer, encode.weight_scales[segment.write], row, scale_inv)

    def _write_scales(self, encode: Encode, amax: Tensor | None) -> None:
        if amax is not None:
            for weight, name in encode.weight_scales.items():
                scale_inv = numerics.scale_inv(amax, self._writer.specs[weight].dtype)
                write_rows(self._writer, name, 0, scale_inv.reshape(1, 1))
        for name, value in encode.input_scales.items():
            write_rows(self._writer, name, 0, torch.tensor([[value]]))

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


def _view(buffer: Tensor, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """The start of a byte buffer as `[rows, columns]`; fresh memory for a single row that is too long for it."""
    size = rows * columns * dtype.itemsize
    if size > buffer.numel():
        buffer = torch.empty(size, dtype=torch.uint8)
    return buffer[:size].view(dtype).view(rows, columns)
