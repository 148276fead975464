"""Work: a planned command, and how it is done: written beside the destination, checked, renamed."""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from precisionctl import __version__
from precisionctl.checkpoints import encodings_file
from precisionctl.checkpoints.base import Reader, Writer
from precisionctl.checkpoints.encodings_file import WeightEncodings
from precisionctl.checkpoints.megatron.keys import write_tracker
from precisionctl.checkpoints.megatron.run import MegatronReader, WithOptimizer
from precisionctl.checkpoints.output import Output, disk_problems
from precisionctl.checkpoints.torch_dist.masters import prove_masters
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.conversion.convert import OnBytes, check, run
from precisionctl.conversion.journal import Journal, open_journal, open_share_journal
from precisionctl.conversion.manifest import write_manifest
from precisionctl.conversion.ranks import ALONE, Ranks
from precisionctl.conversion.worker import Source
from precisionctl.errors import DiskProblem, OutputError
from precisionctl.fp8.state import Fp8States
from precisionctl.planning.plan import Plan

Finish = Callable[[Mapping[str, float]], Fp8States | None]
"""From what the jobs found out (the amax of each FP8 GEMM's weight, codes that changed) to the state that the result
holds."""


@dataclass(frozen=True)
class Work:
    """A planned command: everything that could be checked is, and nothing is written yet. `trained` is the reader
    where its optimizer goes along. `coded` is how weights were coded: it goes along beside values, and codes are made
    by it."""

    reader: Reader
    plan: Plan
    writer: Writer
    output: Output
    finish: Finish
    wants_amax: bool
    digest: str
    notes: list[str]
    trained: MegatronReader | None = None
    coded: WeightEncodings | None = None

    @property
    def source(self) -> Source:
        """Where tensors are read from: the model, and the optimizer that goes along."""
        return WithOptimizer(self.trained) if self.trained else self.reader

    @property
    def iteration(self) -> int | None:
        """Of the result: weights alone belong to no run."""
        return self.trained.iteration if self.trained else None


def digest_of(plan: Plan, command: object, fp8_state: Path | None, coded: WeightEncodings | None) -> str:
    """What makes a command this one: a partial result of any other is not gone on with. Files beside the source count
    by size and time."""
    files = [file for file in (coded.path if coded else None, fp8_state) if file and file.is_file()]
    about = [[file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return hashlib.sha256(f"{__version__} {plan.digest} {command} {about}".encode()).hexdigest()


def open_output(destination: Path, *sources: Path | None) -> Output:
    """Raises DestinationExists, and OutputError where writing would touch what is read."""
    output = Output(destination)
    output.check_free()
    for source in filter(None, sources):
        read, written = source.resolve(), (output.path.resolve(), output.partial.resolve(), output.journal.resolve())
        if any(read == path or read in path.parents or path in read.parents for path in written):
            raise OutputError(
                "the destination, or what is written beside it, and the source are one in the other",
                where=destination,
                do="Choose a destination outside the source.",
            )
    return output


def execute(
    work: Work,
    *,
    workers: int = 2,
    restart: bool = False,
    verify: bool = False,
    ranks: Ranks = ALONE,
    on_bytes: OnBytes = lambda count: None,
) -> None:
    """Do it. The destination appears only when it is complete; after a failure the same command goes on.

    `verify` reads everything back before that; `on_bytes` hears of those bytes too.
    """
    with disk_problems(work.output), _journal(work, restart, ranks) as journal:
        if ranks.first and isinstance(work.trained, TorchDistReader) and work.trained.in_buckets:
            work.notes.extend(filter(None, [prove_masters(work.trained)]))
        carried = work.coded.encodings if work.coded else {}
        found = run(
            work.plan,
            work.source,
            work.writer,
            journal=journal,
            weight_amax=work.wants_amax,
            carried=carried,
            workers=workers,
            ranks=ranks,
            on_bytes=on_bytes,
        )
        found |= ranks.gather("found", found)
        checksums: dict[str, str] = {}
        if verify:
            if ranks.first:
                ranks.tell("written")  # it has heard from all
            ranks.hear("written")  # what a rank reads back is others' work too
            checksums = check(
                work.plan,
                work.source,
                work.writer,
                carried=carried,
                workers=workers,
                ranks=ranks,
                on_bytes=on_bytes,
            )
            checksums |= ranks.gather("checksums", checksums)
        if ranks.first:
            _finish(work, found, checksums)


@contextmanager
def _journal(work: Work, restart: bool, ranks: Ranks) -> Iterator[Journal]:
    """This rank's. The first begins, the others come after it, if they are about the same.

    Raises OutputError where they are not: another command, or another state of the source.
    """
    about = f"{work.digest} {sorted((file.name, file.stat().st_size) for file in work.reader.files)}"
    if not ranks.first:
        if ranks.hear("begun") != about:
            raise OutputError(
                f"rank {ranks.rank} plans something else than the first rank",
                where=work.output.path,
                do="Give every rank the same command, and the same files at the same paths.",
            )
        with open_share_journal(work.output, ranks.rank) as journal:
            yield journal
        return
    files = work.reader.files
    with open_journal(work.output, work.digest, files, ranks=ranks.count, restart=restart) as journal:
        _check_room(work)
        ranks.tell("begun", about)
        yield journal


def _finish(work: Work, found: Mapping[str, float], checksums: Mapping[str, str]) -> None:
    work.writer.finish(work.finish(found))
    if work.coded and not any(job.encode for job in work.plan.jobs):
        encodings_file.write(work.writer.directory, work.coded)
    write_manifest(work.writer.directory, work.reader, work.plan.digest, checksums)
    if work.plan.target == "megatron":
        write_tracker(work.output.partial, work.iteration)
    work.output.commit()


def _check_room(work: Work) -> None:
    free = shutil.disk_usage(work.output.partial).free
    there = sum(file.stat().st_blocks * 512 for file in work.output.partial.rglob("*") if file.is_file())
    specs, writer = work.writer.specs, work.writer
    needed = sum(chunk.box.elements * specs[name].dtype.itemsize for name in specs for chunk in writer.chunks(name))
    if free + there < needed:  # ranks may hold copies of a tensor
        raise DiskProblem(
            f"{needed:,} bytes to write, {free:,} bytes free",
            where=work.output.path.parent,
            do="Make room and run the same command again.",
        )
