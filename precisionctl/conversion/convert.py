"""The only loop over tensors: distribute jobs to ranks and worker processes, and record finished jobs in the journal.

If source or target is a live model, this process is the only worker.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from precisionctl.checkpoints.base import TensorSource
from precisionctl.checkpoints.chunks import Chunk, Chunked, chunk_files
from precisionctl.checkpoints.output import forget, sync_all
from precisionctl.codes.encoding import Encoding
from precisionctl.conversion.journal import Journal
from precisionctl.conversion.outcome import Outcome
from precisionctl.conversion.ranks import NO_OTHERS, Ranks
from precisionctl.conversion.worker import Checker, Worker
from precisionctl.planning.plan import Job, Plan
from precisionctl.processes import deal, in_processes
from precisionctl.torch_when_used import one_torch_thread

SYNC_EVERY = 64 << 20
"""Bytes between two records in the journal, at least; a crash can lose that much work. It is small so that the disk
writes while the workers copy."""

OnBytes = Callable[[int], None]
"""Is called with a number of further bytes that are done, for a progress bar."""

_log = logging.getLogger(__name__)
JobResult = tuple[Job, Outcome]
"""A finished job, and what it found out about its tensors."""


class Target(Chunked, Protocol):
    """The part of a Writer that a conversion needs."""

    def lay_out(self) -> None:
        """As `Writer.lay_out`."""
        ...


def convert(
    plan: Plan,
    reader: TensorSource,
    writer: Target,
    *,
    journal: Journal | None = None,
    collect_weight_amax: bool = False,
    former: Mapping[str, Encoding] = MappingProxyType({}),
    workers: int = 1,
    ranks: Ranks = NO_OTHERS,
    on_bytes: OnBytes = lambda count: None,
) -> Outcome:
    """Write this rank's share of a plan's targets, except what its journal says is done. The caller finishes the Writer
    and commits the output.

    `collect_weight_amax` collects the amax of each FP8 GEMM's weight. `former` are the encodings that values which
    become codes had before, by the target's names. More than one worker needs files on both sides. `on_bytes` is called
    with numbers of bytes as they are written, first with that of the bytes written before.

    Returns the outcome of all jobs, also of those done before.
    """
    if journal and journal.done:
        # a file that was cut off would be filled with zeros
        ends = _ends(plan, writer)
        if not all(file.is_file() and file.stat().st_size >= end for file, end in ends.items()):
            journal.forget()
    done = frozenset(journal.done) if journal else frozenset()
    ranks.gather("checked", {})  # all have looked, before the first rank creates files that another one found missing
    if ranks.first:
        writer.lay_out()
        ranks.publish("laid out")
    ranks.receive("laid out")
    share = _Share(plan, writer, ranks) if ranks.count > 1 else writer
    # those that write into this rank's part; the first rank does those that write nothing (which check that a bias
    # without a place in the target is zero)
    jobs = [job for job in plan.jobs if (any(map(share.chunks, job.outputs)) if job.outputs else ranks.first)]
    on_bytes(sum(plan.job_bytes(job) for job in jobs if job.name in done))
    todo = [job for job in jobs if job.name not in done]
    _log.info("%d of %d jobs are to be done, by %d workers", len(todo), len(jobs), workers)
    outcome = Outcome()
    if journal:
        outcome |= journal.outcome
    if before := sum(len(job.outputs) for job in jobs if job.name in done):
        of = sum(len(job.outputs) for job in jobs)
        outcome.notes.append(f"Continued: {before} of {of} tensors were written before.")
    worker = Worker(plan, reader, share, collect_weight_amax, former)
    results = in_processes(worker.do, todo, [plan.job_bytes(job) for job in todo], workers)
    with _torch_for(worker, todo), closing(results), _JournalWriter(plan, share, journal) as journaled:
        for job, new in results:
            outcome |= new
            journaled.add((job, new))
            on_bytes(plan.job_bytes(job))
            _log.info("%s: %d bytes", job.name, plan.job_bytes(job))
    return outcome


def _torch_for(worker: Worker, jobs: Iterable[Job]) -> AbstractContextManager[None]:
    """PyTorch in one thread, imported before workers are forked, if any of these jobs needs it."""
    return one_torch_thread() if any(worker.needs_torch(job) for job in jobs) else nullcontext()


def read_back(
    plan: Plan,
    reader: TensorSource,
    writer: Chunked,
    *,
    former: Mapping[str, Encoding],
    workers: int,
    ranks: Ranks,
    on_bytes: OnBytes,
) -> dict[str, str]:
    """Read this rank's share of the targets back from the disk, and compare it with the source, converted again.

    Returns the SHA-256 of each tensor's row-major bytes, by name. Raises DamagedCheckpoint for the first difference.
    """
    for file in chunk_files(writer, plan.targets):
        forget(file)
    # whole jobs, not equal bytes as when writing: a SHA-256 is of a whole tensor
    shares = deal([plan.job_bytes(job) for job in plan.jobs], ranks.count)
    jobs = [plan.jobs[number] for number in shares[ranks.rank]] if ranks.rank < len(shares) else []
    checksums: dict[str, str] = {}
    checker = Checker(plan, reader, writer, former=former)
    results = in_processes(checker.check, jobs, [plan.job_bytes(job) for job in jobs], workers)
    with _torch_for(checker, jobs), closing(results):
        for job, of_job in results:
            checksums |= of_job
            on_bytes(plan.job_bytes(job))
    return checksums


def parts_of_ranks(plan: Plan, writer: Chunked, count: int) -> list[dict[Path, range]]:
    """The bytes that each of `count` ranks writes, by file. Laid end to end, all files are cut into equal parts; a cut
    moves to where a file begins if that is near."""
    ends = _ends(plan, writer)
    files = sorted(ends)
    begins = [0, *accumulate(ends[file] for file in files)]
    cuts = [_cut(begins, begins[-1] * rank // count, begins[-1] // count // 20) for rank in range(count + 1)]
    return [
        {
            file: range(max(start, begin) - begin, min(stop, end) - begin)
            for file, begin, end in zip(files, begins, begins[1:], strict=False)
            if start < end and begin < stop
        }
        for start, stop in pairwise(cuts)
    ]


def _ends(plan: Plan, writer: Chunked) -> dict[Path, int]:
    """Where the last tensor of each file that is written ends."""
    ends: dict[Path, int] = {}
    for name in plan.targets:
        for chunk in writer.chunks(name):
            assert isinstance(chunk.place, Path), "a live model has one rank, and no journal"
            end = chunk.offset + chunk.box.elements * writer.specs[name].dtype.itemsize
            ends[chunk.place] = max(end, ends.get(chunk.place, 0))
    return ends


def _cut(begins: Sequence[int], at: int, near: int) -> int:
    """Where to cut files that begin at `begins`, near to `at`."""
    nearest = min(begins, key=lambda begin: abs(begin - at))
    begin = begins[bisect_right(begins, at) - 1]
    return nearest if abs(nearest - at) <= near else at - (at - begin) % CUT_AT


CUT_AT = 1 << 20
"""A file is cut between ranks at multiples of this many bytes, so that no two hosts write into one page of it: some
network file systems may lose one of the two writes."""


class _Share:
    """The part of a target that this rank writes."""

    def __init__(self, plan: Plan, writer: Target, ranks: Ranks) -> None:
        self.specs, self._writer = writer.specs, writer
        self._mine = parts_of_ranks(plan, writer, ranks.count)[ranks.rank]

    def chunks(self, name: str) -> Sequence[Chunk]:
        itemsize, mine = self.specs[name].dtype.itemsize, list[Chunk]()
        for chunk in self._writer.chunks(name):
            if isinstance(chunk.place, Path) and chunk.place in self._mine:
                part = self._mine[chunk.place]
                first, stop = (  # the elements that begin in this part of the file
                    min(max(0, -((chunk.offset - byte) // itemsize)), chunk.box.elements)
                    for byte in (part.start, part.stop)
                )
                mine += [replace(chunk, only=box) for box in chunk.box.run(first, stop - first)]
        return mine


class _JournalWriter:
    """Syncs finished jobs and records them in the journal, in a thread, so that the disk is busy while workers copy."""

    def __init__(self, plan: Plan, writer: Chunked, journal: Journal | None) -> None:
        self._plan, self._writer, self._journal = plan, writer, journal
        self._batch: list[JobResult] = []
        self._bytes = 0
        self._thread = ThreadPoolExecutor(1)
        self._running: Future[None]
        self._next()

    def add(self, result: JobResult) -> None:
        """Add a finished job. Raises the error of an earlier sync, if any."""
        self._batch.append(result)
        self._bytes += self._plan.job_bytes(result[0])
        if self._bytes >= SYNC_EVERY and self._running.done():
            self._running.result()
            self._next()

    def _next(self) -> None:
        self._running = self._thread.submit(self._record, self._batch)
        self._batch, self._bytes = [], 0

    def _record(self, batch: list[JobResult]) -> None:
        if self._journal is None or not batch:
            return
        sync_all(chunk_files(self._writer, (name for job, _ in batch for name in job.outputs)))
        outcome = Outcome()
        for _, new in batch:
            outcome |= new
        self._journal.record([job.name for job, _ in batch], outcome)

    def __enter__(self) -> "_JournalWriter":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Record the rest, also after an error, unless syncing itself has failed."""
        with self._thread:
            if self._running.exception() is None:
                self._next()
        if error is None:
            self._running.result()
