"""Readers that can have an optimizer, of Megatron or of another trainer, and what they say of the run in one form."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from precisionctl.architectures.param_map import Row
from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.megatron.arguments import read_muon_args
from precisionctl.checkpoints.megatron.carried_run import momentum_of, optimizer_settings, step_and_groups
from precisionctl.checkpoints.megatron.directory import MegatronReader, of_megatron
from precisionctl.checkpoints.other_trainers.torch_muon import torch_muon
from precisionctl.checkpoints.other_trainers.trainer_run import (
    NO_COUNT,
    TrainedReader,
    TrainerRun,
    adam_settings,
    count_of_updates,
    muon_settings,
    of_trainer,
    stored_group,
)
from precisionctl.errors import DROP_OPTIMIZER, CheckpointError, damage

RunReader = MegatronReader | TrainedReader

_NOT_TO = {
    "torchtitan": "torchtitan has Muon for its `kimi_k2_7` models alone, which are not written",
    "deepspeed-universal": "DeepSpeed's universal checkpoints have the moments of Adam alone",
}
"""Why Muon's momentum does not go into another trainer's container (torchtitan's model configs of 2026-08, whose only
ones with Muon are Kimi K2.5's; deepspeed/checkpoint/ds_to_universal.py of 0.19)."""


def of_run(reader: Reader) -> TypeGuard[RunReader]:
    """Whether a checkpoint is of a kind that can have an optimizer."""
    return of_megatron(reader) or of_trainer(reader)


def trainer_run_of(reader: RunReader, container: str, rows: Sequence[Row]) -> TrainerRun:
    """As `run_of`, to be saved in the container of another trainer: of a Muon, whose matrices in the result have these
    `rows`, all settings of torch's. Raises CheckpointError also for a Muon that has no place there."""
    run = run_of(reader)
    return replace(run, muon=_as_torchs(reader, container, rows)[0]) if run.muon else run


def muon_notes(reader: RunReader, container: str, rows: Sequence[Row]) -> tuple[str, ...]:
    """In words, what torch's Muon does otherwise than the one that trained. Raises as `trainer_run_of`."""
    return _as_torchs(reader, container, rows)[1] if run_of(reader).muon else ()


def _as_torchs(reader: RunReader, container: str, rows: Sequence[Row]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    why = _NOT_TO.get(container)
    if why is None and of_megatron(reader):
        group = next(group for one in optimizer_settings(reader) if (group := momentum_of(one)))
        return torch_muon(read_muon_args(reader.args), group, rows, reader.path)
    why = why or "of a DCP, Muon's settings are read as far as Megatron's has them"
    raise CheckpointError(f"Muon's momentum (`momentum_buffer`): {why}", where=reader.path, do=DROP_OPTIMIZER)


def run_of(reader: RunReader) -> TrainerRun:
    """A run, also Megatron's, in the words of other trainers. Raises CheckpointError where it lacks Adam's count."""
    if of_trainer(reader):
        return reader.trainer_run
    assert of_megatron(reader)
    with damage("an optimizer that is not Megatron's", reader.path, DROP_OPTIMIZER):
        optimizers = optimizer_settings(reader)
        adam = next((one for one in optimizers if not momentum_of(one)), {})  # the first of several
        step, groups = step_and_groups(adam)
        if adam and groups is None:
            raise ValueError("no groups of parameters")
        count = reader.iteration if step is None else step
        if count is None:
            raise CheckpointError(NO_COUNT, where=reader.path, do=DROP_OPTIMIZER)

        with_decay = (group for group in groups or () if group.get("wd_mult") != 0.0)
        group = next(with_decay, groups[0] if groups else {})
        rates = {"initial_lr": group["max_lr"]} if "max_lr" in group else {}
        settings = adam_settings([stored_group({**group, **rates}, reader.path)], reader.path)

        # the settings of a Muon beside Adam that are known to mean the same elsewhere
        momentums = [momentum for one in optimizers if (momentum := momentum_of(one))]
        own = [stored_group(momentums[0], reader.path)] if momentums else []
        muon = muon_settings(own, reader.path, ("momentum",))
        left = ("the schedule", "random generators")
        return TrainerRun(count_of_updates(count, "a parameter", reader.path), settings, left, muon)
