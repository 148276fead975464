"""The Writer of each container, for a plan."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from precisionctl.architectures.families import to_hf_config
from precisionctl.checkpoints.base import Companions, Writer
from precisionctl.checkpoints.huggingface import MAX_SHARD_SIZE, HuggingFaceWriter, config_dtype
from precisionctl.checkpoints.huggingface_files import BIN, SAFETENSORS
from precisionctl.checkpoints.megatron.carried_run import CarriedRun
from precisionctl.checkpoints.megatron.keys import directory_name
from precisionctl.checkpoints.output import Output
from precisionctl.checkpoints.torch_dist.writer import TorchDistWriter
from precisionctl.checkpoints.torch_legacy.writer import LegacyWriter
from precisionctl.export.export import Export
from precisionctl.fp8.extra_state_writer import TeVersion
from precisionctl.param import Layout
from precisionctl.planning.plan import Plan

CONTAINERS: Mapping[Layout, tuple[str, ...]] = {"hf": ("safetensors", "bin"), "megatron": ("torch_dist", "torch")}
"""What is written of each layout; the first where none is asked for."""


def hf_writer(
    output: Output,
    plan: Plan,
    companions: Companions,
    *,
    container: str | None = None,
    export: Export | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
    live: bool = False,
    files: Mapping[str, bytes] = MappingProxyType({}),
    lacks: Callable[[Mapping[str, Any]], Iterable[str]] = lambda config: (),
) -> HuggingFaceWriter:
    """The Writer of a plan's Hugging Face directory, with the `quantization_config` and files of an `export` and
    further `files`. `live`: the FP8 state is what the model computes with, and not a sidecar. `lacks` gives the keys
    that a reader misses in a config; they are added."""
    return HuggingFaceWriter(
        output.partial,
        plan.targets,
        companions,
        to_hf_config(plan.model, config_dtype(plan.targets)),
        quantization=export.quantization if export else None,
        extra_files={**(export.files if export else {}), **files},
        max_shard_size=max_shard_size,
        spelling=BIN if container == "bin" else SAFETENSORS,
        live=live,
        lacks=lacks,
    )


def megatron_writer(
    output: Output,
    plan: Plan,
    companions: Companions,
    *,
    container: str | None = None,
    run: CarriedRun,
    fp8_in: Literal["extra_state", "sidecar"],
    te: TeVersion = 2,
) -> Writer:
    """The Writer of a plan's Megatron directory: an iteration, where a `run` goes along, else a release."""
    make = LegacyWriter if container == "torch" else TorchDistWriter
    return make(
        output.partial / directory_name(run.iteration),
        plan.model,
        plan.targets,
        parallelism=plan.parallelism,
        run=run,
        companions=companions,
        fp8_in=fp8_in,
        te=te,
    )
