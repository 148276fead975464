"""The only loop over tensors: jobs are dealt out to ranks and processes, and what is done is put on record.

Workers are processes, forked when everything is planned and open, because casting small pieces is half Python: two
threads encoded no faster than one. A live model, as source or target, is in this process, and so is its one worker.
"""

import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar

import torch

from precisionctl.checkpoints.base import Chunk, Chunked
from precisionctl.checkpoints.output import forget, sync
from precisionctl.conversion.journal import Journal
from precisionctl.conversion.ranks import ALONE, Ranks
from precisionctl.conversion.worker import Checker, Source, Worker
from precisionctl.errors import OutputError
from precisionctl.fp8.encoding import Encoding
from precisionctl.planning.plan import Job, Plan

SYNC_EVERY = 64 << 20
"""Bytes between two records in the journal, at least: what a crash of the machine can cost. It is small so that the
disk writes while the workers copy."""

OnBytes = Callable[[int], None]
T = TypeVar("T")
Result = tuple[Job, Mapping[str, float]]
"""A job that is done, and what it found out, by name (`Worker.do`)."""


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
    carried: Mapping[str, Encoding] = MappingProxyType({}),
    workers: int = 1,
    ranks: Ranks = ALONE,
    on_bytes: OnBytes = lambda count: None,
) -> dict[str, float]:
    """Write this rank's share of `plan`'s targets but what its journal says is done; `finish` and commit are the
    caller's.

    Returns what jobs found out: the largest magnitude of each FP8 GEMM's weight, by the weight's name, if `weight_amax`
    asks for it, and by name of each tensor that was coded as `carried` says and could not keep its scales, how many
    codes have changed. `on_bytes` hears of bytes written; first of those that were written before. More than one of
    `workers` need files on both sides.
    """
    done = journal.done if journal and all(file.is_file() for file in _files(plan.targets, writer)) else set()
    ranks.gather("checked", {})  # before the first rank makes anew what another one has lost
    if ranks.first:
        writer.lay_out()  # a lost file was not done
        ranks.tell("laid out")
    ranks.hear("laid out")
    share = _Share(plan, writer, ranks) if ranks.count > 1 else writer
    jobs = [job for job in plan.jobs if _is_mine(job, share, ranks)]
    on_bytes(sum(nbytes(job, plan) for job in jobs if job.name in done))
    todo = [job for job in jobs if job.name not in done]
    found: dict[str, float] = dict(journal.found) if journal else {}
    results = by_workers(Worker(plan, reader, share, weight_amax, carried).do, todo, plan, workers)
    with one_torch_thread(), closing(results), _Recorder(plan, share, journal) as recorder:
        for job, new in results:
            found |= new
            recorder.add((job, new))
            on_bytes(nbytes(job, plan))
    return found


def _is_mine(job: Job, share: Chunked, ranks: Ranks) -> bool:
    """Whether a job writes into this rank's files; what writes nothing (zeros that are left out) is the first's."""
    names = job.outputs
    return any(share.chunks(name) for name in names) if names else ranks.first


def check(
    plan: Plan,
    reader: Source,
    writer: Chunked,
    *,
    carried: Mapping[str, Encoding] = MappingProxyType({}),
    workers: int = 1,
    ranks: Ranks = ALONE,
    on_bytes: OnBytes = lambda count: None,
) -> dict[str, str]:
    """Read this rank's share of the jobs' targets back from the disk, and hold them against the source through the map.

    Returns the SHA-256 of each tensor, of its row-major bytes. Raises DamagedCheckpoint for the first difference.
    """
    for file in _files(plan.targets, writer):
        forget(file)
    shares = deal([nbytes(job, plan) for job in plan.jobs], ranks.count)
    jobs = [plan.jobs[number] for number in shares[ranks.rank]] if ranks.rank < len(shares) else []
    checksums: dict[str, str] = {}
    results = by_workers(Checker(plan, reader, writer, carried=carried).check, jobs, plan, workers)
    with one_torch_thread(), closing(results):
        for job, found in results:
            checksums |= found
            on_bytes(nbytes(job, plan))
    return checksums


def nbytes(job: Job, plan: Plan) -> int:
    """Bytes that a job writes, its scales included."""
    return sum(plan.targets[name].nbytes for name in job.outputs)


def _files(names: Iterable[str], writer: Chunked) -> set[Path]:
    return {chunk.place for name in names for chunk in writer.chunks(name) if isinstance(chunk.place, Path)}


class _Share:
    """A rank's part of a target: whole files, neighbouring ones, of about as many bytes as every other rank's."""

    def __init__(self, plan: Plan, writer: Target, ranks: Ranks) -> None:
        self.specs, self._writer = writer.specs, writer
        sizes: dict[Path, int] = {}
        for name in plan.targets:
            for chunk in writer.chunks(name):
                assert isinstance(chunk.place, Path), "a live model has one rank"
                itemsize = writer.specs[name].dtype.itemsize
                sizes[chunk.place] = sizes.get(chunk.place, 0) + chunk.box.elements * itemsize
        files, shares = sorted(sizes), deal([sizes[file] for file in sorted(sizes)], ranks.count)
        self._mine = {files[number] for number in shares[ranks.rank]} if ranks.rank < len(shares) else set()

    def chunks(self, name: str) -> Sequence[Chunk]:
        return [chunk for chunk in self._writer.chunks(name) if chunk.place in self._mine]


class _Recorder:
    """Syncs what is done and then puts it on record, in the background: the disk is busy while workers copy."""

    def __init__(self, plan: Plan, writer: Chunked, journal: Journal | None) -> None:
        self._plan, self._writer, self._journal = plan, writer, journal
        self._batch: list[Result] = []
        self._bytes = 0
        self._thread = ThreadPoolExecutor(1)
        self._running: Future[None]
        self._next()

    def add(self, result: Result) -> None:
        """Raises what an earlier sync met."""
        self._batch.append(result)
        self._bytes += nbytes(result[0], self._plan)
        if self._bytes >= SYNC_EVERY and self._running.done():
            self._running.result()
            self._next()

    def _next(self) -> None:
        self._running = self._thread.submit(self._record, self._batch)
        self._batch, self._bytes = [], 0

    def _record(self, batch: list[Result]) -> None:
        if self._journal is None or not batch:
            return
        for file in _files((name for job, _ in batch for name in job.outputs), self._writer):
            sync(file)
        found = {name: value for _, new in batch for name, value in new.items()}
        self._journal.record([job.name for job, _ in batch], found)

    def __enter__(self) -> "_Recorder":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """After an error too, what was done before it goes on record, unless it is the disk that fails."""
        with self._thread:
            if self._running.exception() is None:
                self._next()
        if error is None:
            self._running.result()


def by_workers(task: Callable[[Job], T], jobs: list[Job], plan: Plan, workers: int) -> Generator[tuple[Job, T]]:
    """Each job with what `task` returns for it, as they come. A worker's error is raised here, after the others have
    been stopped."""
    if workers == 1:
        yield from ((job, task(job)) for job in jobs)
        return
    children: dict[Connection, BaseProcess] = {}
    try:
        for share in deal([nbytes(job, plan) for job in jobs], workers):
            receiver, process = _fork(task, jobs, share, list(children))
            children[receiver] = process
        while children:
            for receiver in [receiver for receiver in wait(list(children)) if isinstance(receiver, Connection)]:
                try:
                    message = receiver.recv()
                except EOFError:
                    _check_exit(children.pop(receiver))
                    continue
                if isinstance(message, Exception):
                    raise message
                number, result = message
                yield jobs[number], result
    finally:
        for process in children.values():
            process.terminate()
            process.join()


def deal(costs: Sequence[int], shares: int) -> list[range]:
    """Neighbouring items in `shares` runs of about equal cost: a worker keeps to files of its own where it can."""
    total, spent, starts = sum(costs), 0, [0]
    for number, cost in enumerate(costs):
        if len(starts) < shares and spent + cost / 2 >= total * len(starts) / shares:
            starts.append(number)
        spent += cost
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(costs)], strict=True)]


def _fork(
    task: Callable[[Job], T], jobs: list[Job], share: range, others: list[Connection]
) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(task, jobs, share, sender, [receiver, *others]), daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 warns of locks that other threads may hold: the child touches none, and leaves by os._exit
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()  # the child's is the only one now, so its end is an end of file
    return receiver, process


def _child(
    task: Callable[[Job], T], jobs: list[Job], share: range, results: Connection, parents: list[Connection]
) -> None:
    """The life of a worker. Where its parent is gone, sending fails and it ends."""
    for receiver in parents:  # inherited; with a reader left, here or in a sibling, sending would not fail
        receiver.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1  # whatever happens; only all jobs done is 0
    try:
        for number in share:
            results.send((number, task(jobs[number])))
        code = 0
    except Exception as error:
        error.add_note(traceback.format_exc())
        results.send(error)
    finally:
        os._exit(code)


def _check_exit(process: BaseProcess) -> None:
    process.join()
    if process.exitcode:
        raise OutputError(
            f"a worker process was killed (exit code {process.exitcode})",
            do="Was there memory enough? Run the same command again: it goes on where this one stopped.",
        )


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Workers are the parallelism; torch's own threads would only fight them over small pieces."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
