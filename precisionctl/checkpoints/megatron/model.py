"""Which model a Megatron checkpoint holds, whatever its container."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precisionctl.architectures.families import from_hf_config, from_megatron_args
from precisionctl.architectures.megatron_args import MEGATRON_ONLY, as_in_megatron, read_megatron_args
from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.companions import parse_json, read_companions
from precisionctl.checkpoints.megatron.keys import COMPANIONS, VERL, VERL_COMPANIONS
from precisionctl.checkpoints.megatron.logical import EMBEDDING
from precisionctl.errors import DamagedCheckpoint, shown
from precisionctl.model_shape import ModelShape
from precisionctl.param import TensorSpec
from precisionctl.untrusted.safe_files import check_link


def companions_of(directory: Path) -> Companions:
    """Hugging Face's files that travel with an iteration, or that verl keeps beside it."""
    check_link(directory / COMPANIONS, directory)
    beside = directory.parent / VERL_COMPANIONS
    verls = directory.name == VERL and not (directory / COMPANIONS).is_dir() and not beside.is_symlink()
    return read_companions(beside if verls else directory / COMPANIONS)


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
    model = dataclasses.replace(model, **{field: getattr(told, field) for field in MEGATRON_ONLY})
    _check_agreement(model, told, path)
    return model


def _check_agreement(config: ModelShape, args: ModelShape, where: Path) -> None:
    """A config.json that travelled along may be older than the run that went on from it.

    The arguments are to say what config.json says, or what they have instead where they have no word for it.
    """
    differing = config.differences(args)
    contradictions = {name: differing[name] for name in as_in_megatron(config).differences(args) if name in differing}
    if contradictions:
        values = ", ".join(f"{name} {shown(left)} / {shown(right)}" for name, (left, right) in contradictions.items())
        raise DamagedCheckpoint(
            f"it contradicts the arguments of Megatron: {values}",
            where=where,
            do="Remove it to go by the arguments alone.",
        )
