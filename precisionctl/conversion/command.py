"""A planned command, and its execution: the result is written beside the destination, read back if asked for, and
renamed when it is complete."""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from precisionctl import __version__
from precisionctl.checkpoints.base import Reader, TensorSource, WithOptimizer, Writer
from precisionctl.checkpoints.hf_directory import encodings_file
from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.checkpoints.megatron.keys import write_tracker
from precisionctl.checkpoints.megatron.towers import WithTowers
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.output import Output, directory_above, disk_problems
from precisionctl.checkpoints.run_reader import RunReader
from precisionctl.checkpoints.torch_dist.masters import prove_masters
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_legacy.writer import LegacyWriter
from precisionctl.codes.encoding import Encoding
from precisionctl.conversion.convert import OnBytes, convert, read_back
from precisionctl.conversion.journal import (
    Fingerprints,
    Journal,
    fingerprints,
    open_journal,
    open_share_journal,
    was_finished,
)
from precisionctl.conversion.manifest import RunOfWeights, write_manifest
from precisionctl.conversion.outcome import Outcome, nan_notes, zeroed_notes
from precisionctl.conversion.ranks import NO_OTHERS, Ranks
from precisionctl.conversion.recoding import changed_notes
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.errors import DiskProblem, OutputError
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8States
from precisionctl.planning.plan import Plan
from precisionctl.signals import ignore_until_the_end
from precisionctl.sizes import size

MakeStates = Callable[[Mapping[str, float]], tuple[Fp8States, Sequence[str]]]
"""Makes the FP8 state of the result, and notes on it, from the amax of each FP8 GEMM's weight, by name."""


@dataclass(frozen=True)
class PlannedCommand:
    """A command that has been checked as far as possible without writing anything.

    `asked` is what decides the result besides the plan. `files` are the source's as they were when it was opened: in
    one that has changed since, tensors may have other places. `notes` are planning's notes for the user. `states` is
    the FP8 state of the result, or a function that makes it when all weights have been read. `run_reader` is the
    reader if the run's optimizer is converted, too, and `masters` if the weights are made of the optimizer's masters.
    `encodings` is how the weights are, or were, encoded: it is stored beside values, or used to make codes.
    `weights_digest` is that of the source's weights, taken if it has FP8 state. `run_of_weights` is what the manifest
    says of the run that trained them.
    """

    reader: Reader
    plan: Plan
    writer: Writer
    output: Output
    asked: tuple[object, ...]
    files: Fingerprints
    notes: tuple[str, ...]
    states: Fp8States | MakeStates | None = None
    run_reader: RunReader | None = None
    masters: RunReader | None = None
    encodings: WeightEncodings | None = None
    weights_digest: str | None = None
    run_of_weights: RunOfWeights | None = None

    @cached_property  # when it is carried out: for the largest models it takes a second
    def digest(self) -> str:
        """What identifies the command: only the same one may continue a partial result."""
        return hashlib.sha256(str([__version__, self.plan.digest, *self.asked]).encode()).hexdigest()

    @property
    def source(self) -> TensorSource:
        """The source of tensors: the model, with the optimizer if anything is read of it."""
        return WithOptimizer(self.with_optimizer) if self.with_optimizer else self.reader

    @property
    def with_optimizer(self) -> RunReader | None:
        """The reader, if anything is read of the optimizer."""
        return self.run_reader or self.masters

    @property
    def former(self) -> Mapping[str, Encoding]:
        """The encodings that the values had before, by the target's names; empty if they had none."""
        return self.encodings.by_name if self.encodings else {}

    @property
    def iteration(self) -> int | None:
        """The iteration of the result; None for weights without a run."""
        return self.run_reader.iteration if self.run_reader else None


def execute(
    command: PlannedCommand,
    *,
    workers: int = 2,
    restart: bool = False,
    verify: bool = False,
    ranks: Ranks = NO_OTHERS,
    on_bytes: OnBytes = lambda count: None,
) -> Outcome | None:
    """Run a planned command. The destination appears only when it is complete. After a failure the same command
    continues where it stopped.

    `verify` reads everything back before that. `on_bytes` is called with bytes written, and with bytes read back.
    Returns what jobs found out, with notes for the user; None if there was nothing left to do, because the command had
    been killed right after the destination appeared.

    Raises DestinationExists, OutputError (another run, or another partial result, is there; the source changed),
    DiskProblem, and what reading and encoding raise.
    """
    if ranks.first:  # the first rank looks, and tells the others
        finished = was_finished(command.output, command.digest, command.files, ranks=ranks.count)
        ranks.publish("finished", str(finished))
    else:
        finished = ranks.receive("finished") == "True"
    if finished:
        return None
    _check_source(command)
    with disk_problems(command.output), _journal(command, restart, ranks) as journal:
        masters_note, of_run = "", command.with_optimizer
        if ranks.first and isinstance(of_run, TorchDistReader) and of_run.in_buckets:
            masters_note = prove_masters(of_run)  # buckets do not name the parameters that they hold
        outcome = convert(
            command.plan,
            command.source,
            command.writer,
            journal=journal,
            collect_weight_amax=callable(command.states),
            former=command.former,
            workers=workers,
            ranks=ranks,
            on_bytes=on_bytes,
        )
        for others in ranks.gather("found", {str(ranks.rank): outcome.as_json()}).values():
            outcome |= Outcome.from_json(others)
        checksums = _read_back(command, workers, ranks, on_bytes) if verify else {}
        _check_source(command)
        if ranks.first:
            outcome.notes += [*filter(None, [masters_note]), *_finish(command, journal, outcome, checksums)]
    return outcome


def _check_source(command: PlannedCommand) -> None:
    """Raise OutputError if the source is no longer what was planned from."""
    try:
        same = fingerprints(command.reader.files) == command.files
    except FileNotFoundError:
        same = False
    if not same:
        raise OutputError(
            "the source changed after it was opened",
            where=command.reader.path or "",
            do="Wait until nothing writes to it, and run the same command again.",
        )


def _read_back(command: PlannedCommand, workers: int, ranks: Ranks, on_bytes: OnBytes) -> dict[str, str]:
    """Read back all that was written. Returns checksums by name; raises DamagedCheckpoint for what differs from the
    source."""
    if ranks.first:
        ranks.publish("written")  # all ranks have written, as their outcomes are here
    ranks.receive("written")  # a rank also reads back what others have written
    checksums = read_back(
        command.plan,
        command.source,
        command.writer,
        former=command.former,
        workers=workers,
        ranks=ranks,
        on_bytes=on_bytes,
    )
    return checksums | ranks.gather("checksums", checksums)


@contextmanager
def _journal(command: PlannedCommand, restart: bool, ranks: Ranks) -> Iterator[Journal]:
    """This rank's journal, opened by the first rank before the others.

    Raises OutputError if a rank has planned another command, or sees other source files.
    """
    about = f"{command.digest} {sorted((file.name, file.stat().st_size) for file in command.reader.files)}"
    if not ranks.first:
        if ranks.receive("begun") != about:
            raise OutputError(
                f"rank {ranks.rank} plans something else than the first rank",
                where=command.output.path,
                do="Give every rank the same command, and the same files at the same paths.",
            )
        with open_share_journal(command.output, ranks.rank) as journal:
            yield journal
        return
    check_room(command)  # first, so that a refusal leaves nothing, and with `restart` takes nothing away
    with open_journal(command.output, command.digest, command.files, ranks=ranks.count, restart=restart) as journal:
        ranks.publish("begun", about)
        yield journal


def _finish(command: PlannedCommand, journal: Journal, outcome: Outcome, checksums: Mapping[str, str]) -> list[str]:
    """Write what is known only after all tensors, and rename the result. Returns notes for the user."""
    plan, writer, encodings, states = command.plan, command.writer, command.encodings, command.states
    notes = [*nan_notes(outcome.with_nan), *zeroed_notes(outcome.zeroed)]
    if encodings and plan.quantization:
        notes += changed_notes(outcome, encodings, command.reader.specs, plan)
    if callable(states):
        states, state_notes = states(outcome.amax)
        notes += state_notes
    writer.finish(states)
    run, digest = command.run_of_weights, command.weights_digest
    of_source = states is not None and states.of_weights == digest
    if plan.encodes and (run or of_source):
        digest = digest_weights(open_checkpoint(writer.directory))  # encoding has rounded the weights
        if states and of_source:
            sidecar.write(writer.directory / sidecar.RELATIVE, replace(states, of_weights=digest))
    if run:
        run = replace(run, of_weights=digest or digest_weights(command.reader))
    if encodings and not plan.encodes:
        encodings_file.write(writer.directory, encodings)
    write_manifest(writer.directory, command.reader, plan.digest, checksums, run)
    if plan.to_layout == "megatron":
        write_tracker(command.output.partial, command.iteration)
    journal.record_whole()
    # after the rename the same command would find the result, and have nothing to continue
    command.output.commit(on_synced=ignore_until_the_end)
    return notes


def check_room(command: PlannedCommand) -> None:
    """Raise DiskProblem if there is not enough free space for the rest of the result."""
    partial = command.output.partial
    disk = shutil.disk_usage(directory_above(partial))
    there = sum(file.stat().st_blocks * 512 for file in partial.rglob("*") if file.is_file())
    writer = command.writer.text if isinstance(command.writer, WithTowers) else command.writer
    needed = sum(spec.nbytes for spec in command.writer.specs.values())
    if isinstance(writer, LegacyWriter):
        needed += writer.copied
    lacking = needed - there - disk.free
    if disk.total and lacking > 0:  # file systems without blocks of their own say 0 of 0
        raise DiskProblem(
            f"{size(needed)} to write, and {size(disk.free)} are free",
            where=command.output.path.parent,
            do=f"Make room for {size(lacking)} more, and run the same command again.",
        )
