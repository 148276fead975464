"""The one place where a planned result gets its output, its Writer and companions, its model card and its digest."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precisionctl import __version__
from precisionctl.architectures.families import to_hf_config
from precisionctl.checkpoints.base import Writer
from precisionctl.checkpoints.encodings_file import WeightEncodings
from precisionctl.checkpoints.huggingface import HuggingFaceWriter, config_dtype
from precisionctl.checkpoints.huggingface_files import BIN, SAFETENSORS
from precisionctl.checkpoints.megatron.carried_run import NO_RUN, CarriedRun
from precisionctl.checkpoints.megatron.keys import directory_name
from precisionctl.checkpoints.output import Output
from precisionctl.checkpoints.torch_dist.writer import TorchDistWriter
from precisionctl.checkpoints.torch_legacy.writer import LegacyWriter
from precisionctl.commands.request import Request
from precisionctl.commands.source import Source
from precisionctl.conversion.command import MakeStates, PlannedCommand
from precisionctl.errors import OutputError
from precisionctl.export.model_card import NAME, Card
from precisionctl.fp8.state import Fp8States
from precisionctl.model_shape import UntabledModel
from precisionctl.planning.plan import Plan


@dataclass(frozen=True)
class Result:
    """What a result will hold: the tensors of its `plan`, encoded where it is to be; the FP8 state, or what makes it
    when all weights were seen; what comes along of the run that made the source.

    `live`: the state is where whoever computes with the result loads it from, and not in a sidecar. `encodings` is how
    the weights were codes: kept beside values, and codes are made by it. `lacks` gives the keys that an engine misses
    in a config.json; they are added. `notes` are for the user.
    """

    plan: Plan
    notes: Sequence[str]
    states: Fp8States | MakeStates | None = None
    live: bool = False
    run: CarriedRun = NO_RUN
    encodings: WeightEncodings | None = None
    card: Card | None = None
    lacks: Callable[[Mapping[str, Any]], Iterable[str]] = lambda config: ()


def build(request: Request, source: Source, result: Result) -> PlannedCommand:
    """The command that writes a result. Raises DestinationExists, and OutputError where writing would touch what is
    read."""
    output = _open_output(request.destination, request.source, request.reference, request.fp8_state)
    files = [source.encodings.path if source.encodings else None, request.fp8_state]
    stats = [file.stat() for file in files if file and file.is_file()]
    about = [__version__, result.plan.digest, request, [(stat.st_size, stat.st_mtime_ns) for stat in stats]]
    return PlannedCommand(
        source.reader,
        result.plan,
        _writer(request, source, result, output),
        output,
        hashlib.sha256(str(about).encode()).hexdigest(),
        tuple(result.notes),
        result.states,
        source.trained,
        result.encodings,
    )


def _open_output(destination: Path, *sources: Path | None) -> Output:
    """The place to write to, away from all `sources`. A journal beside what is there may say that it is this very
    result (`execute`)."""
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


def _writer(request: Request, source: Source, result: Result, output: Output) -> Writer:
    """The Writer of the container that was asked for: of Megatron's an iteration, where a run goes along, else a
    release."""
    plan, card, companions = result.plan, result.card, source.reader.companions
    if request.to == "hf":
        return HuggingFaceWriter(
            output.partial,
            plan.targets,
            companions,
            {} if isinstance(plan.model, UntabledModel) else to_hf_config(plan.model, config_dtype(plan.targets)),
            quantization=plan.quantization or None,
            extra_files={**plan.files, **({NAME: card.text(source.reader)} if card else {})},
            max_shard_size=request.max_shard_size,
            spelling=BIN if request.container == "bin" else SAFETENSORS,
            live=result.live,
            lacks=result.lacks,
        )
    make = LegacyWriter if request.container == "torch" else TorchDistWriter
    return make(
        output.partial / directory_name(result.run.iteration),
        plan.model,
        plan.targets,
        parallelism=plan.parallelism,
        run=result.run,
        companions=companions,
        fp8_in="extra_state" if result.live else "sidecar",
        te=request.te_version,
    )
