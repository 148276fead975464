"""Work: a command that is planned and ready to run, and how it is run: written beside the destination, read back if
that is asked for, and renamed when it is whole."""

import hashlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from precisionctl import __version__
from precisionctl.checkpoints import encodings_file
from precisionctl.checkpoints.base import Reader, Writer
from precisionctl.checkpoints.encodings_file import WeightEncodings
from precisionctl.checkpoints.megatron.carried_run import MegatronReader, WithOptimizer
from precisionctl.checkpoints.megatron.keys import write_tracker
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.output import Output, directory_above, disk_problems
from precisionctl.checkpoints.torch_dist.masters import prove_masters
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.conversion.convert import OnBytes, check, run
from precisionctl.conversion.encoder import NAN, ZEROED
from precisionctl.conversion.journal import Journal, fingerprints, open_journal, open_share_journal, was_finished
from precisionctl.conversion.manifest import write_manifest
from precisionctl.conversion.ranks import ALONE, Ranks
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.conversion.worker import Source
from precisionctl.errors import DiskProblem, OutputError
from precisionctl.fp8 import sidecar
from precisionctl.fp8.encoding import Encoding
from precisionctl.fp8.state import Fp8States
from precisionctl.planning.plan import Plan

Finish = Callable[[Mapping[str, float]], Fp8States | None]
"""Gives the FP8 state that the result holds, from what the jobs found out: the amax of each FP8 GEMM's weight, or how
many codes have changed."""


@dataclass(frozen=True)
class Work:
    """A command of which all is checked that can be, and nothing written yet.

    `digest` identifies the command: only the same one may go on from a partial result. `notes` are what to tell the
    user, and grow while it runs. `wants_amax`: the jobs are to find the amax of each FP8 GEMM's weight, which `finish`
    needs. `trained` is the reader, where its optimizer goes along. `encodings` is how the weights are FP8
    codes, or were: it is stored beside values, and codes are made by it.
    """

    reader: Reader
    plan: Plan
    writer: Writer
    output: Output
    finish: Finish
    digest: str
    notes: list[str]
    wants_amax: bool = False
    trained: MegatronReader | None = None
    encodings: WeightEncodings | None = None

    @property
    def source(self) -> Source:
        """Where tensors are read from: the model, and the optimizer that goes along."""
        return WithOptimizer(self.trained) if self.trained else self.reader

    @property
    def carried(self) -> Mapping[str, Encoding]:
        """How values were coded that are to be codes again, by the target's names."""
        return self.encodings.by_name if self.encodings else {}

    @property
    def iteration(self) -> int | None:
        """The iteration of the result; None for weights alone, which belong to no run."""
        return self.trained.iteration if self.trained else None


def digest_of(plan: Plan, command: object, fp8_state: Path | None, encodings: WeightEncodings | None) -> str:
    """SHA-256 of what makes a command this one: the program's version, the plan, all that the command says, and the
    files beside the source, by size and time."""
    files = [file for file in (encodings.path if encodings else None, fp8_state) if file and file.is_file()]
    about = [[file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return hashlib.sha256(f"{__version__} {plan.digest} {command} {about}".encode()).hexdigest()


def open_output(destination: Path, *sources: Path | None) -> Output:
    """The place to write to, away from all `sources`. Raises DestinationExists, and OutputError where writing would
    touch what is read. A journal beside what is there may say that it is this very result (`execute`)."""
    output = Output(destination)
    output.check_links()
    if not output.journal.is_file():
        output.check_free()
    for source in filter(None, sources):
        read, written = source.resolve(), (output.path.resolve(), output.partial.resolve(), output.journal.resolve())
        if any(read == path or read in path.parents or path in read.parents for path in written):
            raise OutputError(
                "source and destination (or what is written beside it) overlap",
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
) -> bool:
    """Run a planned command. The destination appears when it is complete, and not before; after a failure the same
    command goes on where it stopped.

    `verify` reads everything back first. `on_bytes` is told of bytes written, and of bytes read back. Returns False
    where there was nothing left to do: the command was killed right after the destination had appeared.
    """
    if _was_finished(work, ranks):
        return False
    with disk_problems(work.output), _journal(work, restart, ranks) as journal:
        before = fingerprints(work.reader.files)
        if ranks.first and isinstance(work.trained, TorchDistReader) and work.trained.in_buckets:
            work.notes.extend(filter(None, [prove_masters(work.trained)]))
        found = run(
            work.plan,
            work.source,
            work.writer,
            journal=journal,
            weight_amax=work.wants_amax,
            carried=work.carried,
            workers=workers,
            ranks=ranks,
            on_bytes=on_bytes,
        )
        found |= ranks.gather("found", found)
        checksums = _read_back(work, workers, ranks, on_bytes) if verify else {}
        if fingerprints(work.reader.files) != before:
            raise OutputError(
                "the source changed while it was read",
                where=work.reader.path or "",
                do="Wait until nothing writes to it, and run the same command with --restart.",
            )
        if ranks.first:
            _finish(work, journal, found, checksums)
    return True


def _was_finished(work: Work, ranks: Ranks) -> bool:
    """What the first rank finds."""
    if not ranks.first:
        return ranks.hear("finished") == "True"
    finished = was_finished(work.output, work.digest, work.reader.files, ranks=ranks.count)
    ranks.tell("finished", str(finished))
    return finished


def _read_back(work: Work, workers: int, ranks: Ranks, on_bytes: OnBytes) -> dict[str, str]:
    """The checksums of all that was written. Raises DamagedCheckpoint for what differs from the source."""
    if ranks.first:
        ranks.tell("written")  # it has heard from all
    ranks.hear("written")  # what a rank reads back is others' work too
    checksums = check(
        work.plan,
        work.source,
        work.writer,
        carried=work.carried,
        workers=workers,
        ranks=ranks,
        on_bytes=on_bytes,
    )
    return checksums | ranks.gather("checksums", checksums)


@contextmanager
def _journal(work: Work, restart: bool, ranks: Ranks) -> Iterator[Journal]:
    """This rank's journal. The first rank begins; the others follow, if they plan the same.

    Raises OutputError where they do not: they have another command, or another state of the source.
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
        check_room(work)
        ranks.tell("begun", about)
        yield journal


def _finish(work: Work, journal: Journal, found: Mapping[str, float], checksums: Mapping[str, str]) -> None:
    with_nan, zeroed = (
        {name.removeprefix(told): value for name, value in found.items() if name.startswith(told)}
        for told in (NAN, ZEROED)
    )
    work.notes.extend([*_nan_note(with_nan), *_zeroed_note(zeroed)])
    states = work.finish({n: value for n, value in found.items() if not n.startswith((NAN, ZEROED))})
    work.writer.finish(states)
    if states and any(job.encode for job in work.plan.jobs) and states.of_weights == digest_weights(work.reader):
        made = digest_weights(open_checkpoint(work.writer.directory))  # of the same weights, rounded to codes
        sidecar.write(work.writer.directory / sidecar.RELATIVE, replace(states, of_weights=made))
    if work.encodings and not any(job.encode for job in work.plan.jobs):
        encodings_file.write(work.writer.directory, work.encodings)
    write_manifest(work.writer.directory, work.reader, work.plan.digest, checksums)
    if work.plan.target == "megatron":
        write_tracker(work.output.partial, work.iteration)
    journal.record_whole()
    work.output.commit()


def _nan_note(names: Collection[str]) -> Iterator[str]:
    """That there are NaN, which the result has as its source has them. They have codes of their own in FP8, so unlike
    infinite weights they are not refused."""
    if names:
        first = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
        yield (
            f"WARNING: the source has NaN in {len(names)} of its tensors, and so has the result ({first}): "
            "what is computed with them is NaN."
        )


def _zeroed_note(shares: Mapping[str, float]) -> Iterator[str]:
    """That tensors lost many of their elements to zero, the worst first, and what helps."""
    if shares:
        worst = sorted(shares, key=lambda name: (-shares[name], name))
        first = ", ".join(f"{name} {shares[name]:.1%}" for name in worst[:3]) + (", ..." if len(worst) > 3 else "")
        yield (
            f"WARNING: many elements became 0 in {len(worst)} of the tensors ({first}): the largest one takes up all "
            "of FP8's range. Leave such modules out with keep_bf16 in a --recipe, or choose a --scheme of finer scales."
        )


def check_room(work: Work) -> None:
    """Raise DiskProblem where the result has no room beside what an unfinished run has left of it."""
    partial = work.output.partial
    free = shutil.disk_usage(directory_above(partial)).free
    there = sum(file.stat().st_blocks * 512 for file in partial.rglob("*") if file.is_file())
    specs, writer = work.writer.specs, work.writer
    needed = sum(chunk.box.elements * specs[name].dtype.itemsize for name in specs for chunk in writer.chunks(name))
    if free + there < needed:  # ranks may hold copies of a tensor
        raise DiskProblem(
            f"{needed:,} bytes to write, {free:,} bytes free",
            where=work.output.path.parent,
            do="Make room and run the same command again.",
        )
