"""Which model a Megatron checkpoint holds, whatever its container."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precisionctl.architectures.find import from_hf_config, from_megatron_args
from precisionctl.architectures.megatron_args import MEGATRON_ONLY, read_megatron_args
from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.companions import parse_json, read_companions
from precisionctl.checkpoints.megatron.keys import COMPANIONS
from precisionctl.checkpoints.megatron.logical import EMBEDDING
from precisionctl.errors import DamagedCheckpoint
from precisionctl.model_shape import ModelShape
from precisionctl.param import TensorSpec
from precisionctl.untrusted.safe_files import check_link


def companions_of(directory: Path) -> Companions:
    """Hugging Face's files that travel with an iteration."""
    check_link(directory / COMPANIONS, directory)
    return read_companions(directory / COMPANIONS)


def model_of(
    directory: Path,
    args: Mapping[str, Any],
    companions: Companions,
    specs: Mapping[str, TensorSpec],
    family: str | None = None,
) -> ModelShape:
    """From the companions' config.json, checked against Megatron's arguments; else from these alone, as one of
    `family` if that is said.

    Raises what they raise, and DamagedCheckpoint where the two contradict each other or there is no embedding.
    """
    if EMBEDDING not in specs:
        raise DamagedCheckpoint(f"no {EMBEDDING}", where=directory)
    rows = specs[EMBEDDING].rows
    if "config.json" not in companions.files:
        return from_megatron_args(args, rows, directory, family)
    path = directory / COMPANIONS / "config.json"
    config = parse_json(companions.files["config.json"], path)
    model = dataclasses.replace(from_hf_config(config, path), padded_vocab_size=rows)
    if not args:
        return model
    told = read_megatron_args(args, rows, directory)
    _check_agreement(model, told, path)
    return dataclasses.replace(model, **{field: getattr(told, field) for field in MEGATRON_ONLY})


def _check_agreement(config: ModelShape, args: ModelShape, where: Path) -> None:
    """A config.json that travelled along may be older than the run that went on from it."""
    fields = (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("tied_embeddings", "norm_epsilon", "rotary_base"),
    )
    differing = [field for field in fields if getattr(config, field) != getattr(args, field)]
    if differing:
        values = ", ".join(f"{field} {getattr(config, field)} / {getattr(args, field)}" for field in differing)
        raise DamagedCheckpoint(
            f"it contradicts the arguments of Megatron: {values}",
            where=where,
            do="Remove it to go by the arguments alone.",
        )
