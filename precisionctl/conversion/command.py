"""A command that is planned and ready to run, and how it is run: written beside the destination, read back if that is
asked for, and renamed when it is whole."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

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
from precisionctl.conversion.findings import Findings, changed_notes, nan_notes, zeroed_notes
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

MakeStates = Callable[[Mapping[str, float]], tuple[Fp8States, Sequence[str]]]
"""Makes the FP8 state that a run will load from the amax of each FP8 GEMM's weight, by name; and says what there is to
tell of it."""


@dataclass(frozen=True)
class PlannedCommand:
    """A command of which all is checked that can be, and nothing written yet.

    `digest` identifies the command: only the same one may go on from a partial result. `notes` are what planning has to
    tell the user. `states` is the FP8 state of the result, or makes it when all weights were seen. `trained` is the
    reader, where its optimizer goes along. `encodings` is how the weights are FP8 codes, or were: it is stored beside
    values, and codes are made by it.
    """

    reader: Reader
    plan: Plan
    writer: Writer
    output: Output
    digest: str
    notes: tuple[str, ...]
    states: Fp8States | MakeStates | None = None
    trained: MegatronReader | None = None
    encodings: WeightEncodings | None = None

    @property
    def source(self) -> Source:
        """Where tensors are read from: the model, and the optimizer that goes along."""
        return WithOptimizer(self.trained) if self.trained else self.reader

    @property
    def coded_before(self) -> Mapping[str, Encoding]:
        """How values were coded that are to be codes again, by the target's names."""
        return self.encodings.by_name if self.encodings else {}

    @property
    def iteration(self) -> int | None:
        """The iteration of the result; None for weights alone, which belong to no run."""
        return self.trained.iteration if self.trained else None


def execute(
    command: PlannedCommand,
    *,
    workers: int = 2,
    restart: bool = False,
    verify: bool = False,
    ranks: Ranks = ALONE,
    on_bytes: OnBytes = lambda count: None,
) -> Findings | None:
    """Run a planned command. The destination appears when it is complete, and not before; after a failure the same
    command goes on where it stopped.

    `verify` reads everything back first. `on_bytes` is told of bytes written, and of bytes read back. Returns what
    was found out; None where there was nothing left to do: the command was killed right after the destination had
    appeared.
    """
    if ranks.first:  # the others hear what it finds
        finished = was_finished(command.output, command.digest, command.reader.files, ranks=ranks.count)
        ranks.tell("finished", str(finished))
    else:
        finished = ranks.hear("finished") == "True"
    if finished:
        return None
    with disk_problems(command.output), _journal(command, restart, ranks) as journal:
        before = fingerprints(command.reader.files)
        proof = ""
        if ranks.first and isinstance(command.trained, TorchDistReader) and command.trained.in_buckets:
            proof = prove_masters(command.trained)
        found = run(
            command.plan,
            command.source,
            command.writer,
            journal=journal,
            collect_weight_amax=callable(command.states),
            carried=command.coded_before,
            workers=workers,
            ranks=ranks,
            on_bytes=on_bytes,
        )
        for said in ranks.gather("found", {str(ranks.rank): found.as_json()}).values():
            found |= Findings.from_json(said)
        checksums = _read_back(command, workers, ranks, on_bytes) if verify else {}
        if fingerprints(command.reader.files) != before:
            raise OutputError(
                "the source changed while it was read",
                where=command.reader.path or "",
                do="Wait until nothing writes to it, and run the same command with --restart.",
            )
        if ranks.first:
            found.notes = [*filter(None, [proof]), *_finish(command, journal, found, checksums)]
    return found


def _read_back(command: PlannedCommand, workers: int, ranks: Ranks, on_bytes: OnBytes) -> dict[str, str]:
    """The checksums of all that was written. Raises DamagedCheckpoint for what differs from the source."""
    if ranks.first:
        ranks.tell("written")  # it has heard from all
    ranks.hear("written")  # what a rank reads back is others' work too
    checksums = check(
        command.plan,
        command.source,
        command.writer,
        carried=command.coded_before,
        workers=workers,
        ranks=ranks,
        on_bytes=on_bytes,
    )
    return checksums | ranks.gather("checksums", checksums)


@contextmanager
def _journal(command: PlannedCommand, restart: bool, ranks: Ranks) -> Iterator[Journal]:
    """This rank's journal. The first rank begins; the others follow, if they plan the same.

    Raises OutputError where they do not: they have another command, or another state of the source.
    """
    about = f"{command.digest} {sorted((file.name, file.stat().st_size) for file in command.reader.files)}"
    if not ranks.first:
        if ranks.hear("begun") != about:
            raise OutputError(
                f"rank {ranks.rank} plans something else than the first rank",
                where=command.output.path,
                do="Give every rank the same command, and the same files at the same paths.",
            )
        with open_share_journal(command.output, ranks.rank) as journal:
            yield journal
        return
    files = command.reader.files
    with open_journal(command.output, command.digest, files, ranks=ranks.count, restart=restart) as journal:
        check_room(command)
        ranks.tell("begun", about)
        yield journal


def _finish(command: PlannedCommand, journal: Journal, found: Findings, checksums: Mapping[str, str]) -> list[str]:
    """Write what only the end knows, and rename the result. Returns what there is to tell of it."""
    plan, writer, encodings, states = command.plan, command.writer, command.encodings, command.states
    notes = [*nan_notes(found.with_nan), *zeroed_notes(found.zeroed)]
    if encodings and plan.quantization:
        notes += changed_notes(found.changed, encodings, {name: plan.targets[name] for name in plan.codes})
    if callable(states):
        states, told = states(found.amax)
        notes += told
    writer.finish(states)
    if states and plan.encodes and states.of_weights == digest_weights(command.reader):
        made = digest_weights(open_checkpoint(writer.directory))  # of the same weights, rounded to codes
        sidecar.write(writer.directory / sidecar.RELATIVE, replace(states, of_weights=made))
    if encodings and not plan.encodes:
        encodings_file.write(writer.directory, encodings)
    write_manifest(writer.directory, command.reader, plan.digest, checksums)
    if plan.target == "megatron":
        write_tracker(command.output.partial, command.iteration)
    journal.record_whole()
    command.output.commit()
    return notes


def check_room(command: PlannedCommand) -> None:
    """Raise DiskProblem where the result has no room beside what an unfinished run has left of it."""
    partial = command.output.partial
    free = shutil.disk_usage(directory_above(partial)).free
    there = sum(file.stat().st_blocks * 512 for file in partial.rglob("*") if file.is_file())
    specs, writer = command.writer.specs, command.writer
    needed = sum(chunk.box.elements * specs[name].dtype.itemsize for name in specs for chunk in writer.chunks(name))
    if free + there < needed:  # ranks may hold copies of a tensor
        raise DiskProblem(
            f"{needed:,} bytes to write, {free:,} bytes free",
            where=command.output.path.parent,
            do="Make room and run the same command again.",
        )
