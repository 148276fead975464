"""Build a planned command: the one place where a result gets output, Writer, companion files and model card."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from precisionctl.checkpoints.base import Writer
from precisionctl.checkpoints.dcp.dcp_writer import DcpWriter, TorchtitanWriter
from precisionctl.checkpoints.deepspeed.writer import DeepSpeedWriter
from precisionctl.checkpoints.gguf.writer import GgufContents, GgufWriter
from precisionctl.checkpoints.hf_directory.companions import to_json
from precisionctl.checkpoints.hf_directory.config_json import config_dtype, made_config
from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.checkpoints.hf_directory.huggingface_files import BIN, MAX_SHARD_SIZE, SAFETENSORS
from precisionctl.checkpoints.huggingface import HuggingFaceWriter
from precisionctl.checkpoints.megatron.carried_run import NO_RUN, CarriedRun
from precisionctl.checkpoints.megatron.keys import directory_name
from precisionctl.checkpoints.megatron.towers import WithTowers
from precisionctl.checkpoints.mlx.mlx_writer import MlxWriter
from precisionctl.checkpoints.output import Output
from precisionctl.checkpoints.run_reader import trainer_run_of
from precisionctl.checkpoints.torch_dist.writer import TorchDistWriter
from precisionctl.checkpoints.torch_legacy.writer import LegacyWriter
from precisionctl.commands.run_precision import RunPrecision
from precisionctl.commands.source import Source
from precisionctl.commands.storage import DCP, DEEPSPEED, TORCH, TORCHTITAN
from precisionctl.conversion.command import MakeStates, PlannedCommand
from precisionctl.conversion.manifest import RunOfWeights
from precisionctl.errors import MappingError, OutputError, RecipeError
from precisionctl.export.model_card import NAME, Card
from precisionctl.fp8.state import Fp8States
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.planning.plan import Plan


@dataclass(frozen=True)
class Result:
    """What a result will hold.

    `plan` has its tensors, already with codes if it is encoded. `states` is its FP8 state, or a function that makes it
    when all weights have been read. With `live` the state is stored where a run loads it from, else in the sidecar.
    `run` is what is carried over from the run that made the source. `encodings` is how the weights were encoded,
    to be kept beside values or to make codes with. `lacks` returns the keys that an engine needs and a config.json does
    not have; they are added. `gguf` are the contents of its GGUF files, if it is such, and `beside` files in their
    directory. `mlx` are mlx-lm's words in the config.json of its directory, if it is one. `trained_in` is the precision
    of the run that the manifest says. `notes` are for the user.
    """

    plan: Plan
    notes: Sequence[str]
    states: Fp8States | MakeStates | None = None
    live: bool = False
    run: CarriedRun = NO_RUN
    encodings: WeightEncodings | None = None
    card: Card | None = None
    lacks: Callable[[Mapping[str, Any]], Iterable[str]] = lambda config: ()
    gguf: Sequence[GgufContents] = ()
    beside: Mapping[str, bytes] = field(default_factory=dict)
    mlx: Mapping[str, Any] | None = None
    trained_in: RunPrecision | None = None


def build(source: Source, result: Result) -> PlannedCommand:
    """The command that writes a result. Raises DestinationExists, and OutputError if source and destination
    overlap."""
    request = source.request
    output = Output(request.destination)
    output.check_links()
    if not output.journal.is_file():  # else `execute` finds out whether it is this same result
        output.check_free()
    written = output.path.resolve(), output.partial.resolve(), output.journal.resolve()
    for read in (path.resolve() for path in (request.source, request.reference, request.fp8_state) if path):
        if any(read == path or read in path.parents or path in read.parents for path in written):
            raise OutputError(
                "source and destination (or what is written beside it) overlap",
                where=request.destination,
                do="Choose a destination outside the source.",
            )

    files = [source.encodings.path if source.encodings else None, request.fp8_state]
    stats = [file.stat() for file in files if file and file.is_file()]
    # by its length all tensors of a GGUF file move: a file of other metadata is not continued
    run = result.trained_in
    metadata = [hashlib.sha256(file.metadata_bytes).hexdigest() for file in result.gguf]
    return PlannedCommand(
        reader=source.reader,
        plan=result.plan,
        writer=_writer(source, result, output),
        output=output,
        asked=(request, [(stat.st_size, stat.st_mtime_ns) for stat in stats], metadata),
        files=source.files,
        notes=tuple(result.notes),
        states=result.states,
        run_reader=source.run_reader,
        masters=source.masters,
        encodings=result.encodings,
        weights_digest=source.known.weights_digest,
        run_of_weights=RunOfWeights(run.keys, run.trained) if run else None,
    )


def _writer(source: Source, result: Result, output: Output) -> Writer:
    """The Writer of the container that was asked for. Raises RecipeError for a size of shards where there are none,
    MappingError for a source without an optimizer where one is needed, and CheckpointError for a trainer's state that
    cannot be read."""
    storage, plan, card, companions = source.request.storage, result.plan, result.card, source.reader.companions
    in_shards = not storage.is_state_dict if storage.layout == "hf" else plan.model.wrapper is not None
    if storage.max_shard_size != MAX_SHARD_SIZE and (result.gguf or not in_shards):
        what = "--max-shard-size is for Hugging Face's files and for towers, and this result has neither"
        raise RecipeError(what, do="Leave --max-shard-size out.")
    if result.gguf:
        return GgufWriter(output.partial, result.gguf, result.beside)
    # of a wrapper its text model's; a wrapper always has a config.json of its own too, and an untabled model that alone
    made = not isinstance(plan.model, UntabledModel)
    config = made_config(plan.model, config_dtype(plan.targets), companions) if made else {}
    extra_files = {**plan.files, **({NAME: card.text(source.reader)} if card else {})}
    if result.mlx:
        return MlxWriter(
            output.partial,
            plan.targets,
            companions,
            config,
            result.mlx,
            plan.quantization,
            extra_files,
            storage.max_shard_size,
        )
    run = None
    if source.run_reader and storage.is_state_dict:
        run = trainer_run_of(source.run_reader, storage.container, plan.muon_rows)
    if storage.container == DCP:
        return DcpWriter(output.partial, plan.targets, companions, config, run)
    updates = run.updates if run else 0
    iteration = updates if source.reader.iteration is None else source.reader.iteration
    if storage.container == TORCHTITAN:
        return TorchtitanWriter(output.partial, plan.targets, companions, config, run, iteration)
    if storage.container == DEEPSPEED:
        if run is None:
            raise MappingError(
                "the source has no optimizer, and DeepSpeed cannot continue without one",
                do="Write --to hf, and start the run from these weights.",
            )
        return DeepSpeedWriter(output.partial, plan.targets, companions, config, run, iteration)
    if storage.layout == "hf":
        return HuggingFaceWriter(
            output.partial,
            plan.targets,
            companions,
            config,
            quantization=plan.quantization or None,
            extra_files=extra_files,
            max_shard_size=storage.max_shard_size,
            file_format=BIN if storage.container == BIN.name else SAFETENSORS,
            live=result.live,
            lacks=result.lacks,
        )
    return _megatron_writer(source, result, output, config)


def _megatron_writer(source: Source, result: Result, output: Output, config: Mapping[str, Any]) -> Writer:
    """The Writer of one of Megatron's containers, with a wrapper's towers beside it. It writes an iteration if a run is
    carried over, else a release. `config` is the model's config.json, for a source of Hugging Face's without one."""
    storage, plan, companions = source.request.storage, result.plan, source.reader.companions
    if source.reader.layout == "hf" and "config.json" not in companions.files:  # Megatron's arguments do not say all
        companions = replace(companions, files={**companions.files, "config.json": to_json(config)})
    make = LegacyWriter if storage.container == TORCH else TorchDistWriter
    writer: Writer = make(
        output.partial / directory_name(result.run.iteration),
        plan.model,
        plan.text.targets,
        parallelism=plan.parallelism,
        run=result.run,
        companions=companions,
        live=result.live,
        te=storage.te_version,
    )
    return WithTowers(writer, plan.towers.targets, storage.max_shard_size) if plan.model.wrapper else writer
