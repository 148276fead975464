"""Readers that can have an optimizer, of Megatron or of another trainer, and what they say of the run in one form."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.megatron.carried_run import has_muon, optimizer_settings, step_and_groups
from precisionctl.checkpoints.megatron.directory import MegatronReader, of_megatron
from precisionctl.checkpoints.other_trainers.trainer_run import (
    NO_COUNT,
    TrainedReader,
    TrainerRun,
    adam_settings,
    count_of_updates,
    of_trainer,
    stored_group,
)
from precisionctl.errors import DROP_OPTIMIZER, CheckpointError, damage

RunReader = MegatronReader | TrainedReader

_ONLY_MEGATRONS = "Muon's momentum (`momentum_buffer`), which goes to Megatron alone"
"""Why an optimizer with Muon cannot be converted to other formats."""


def of_run(reader: Reader) -> TypeGuard[RunReader]:
    """Whether a checkpoint is of a kind that can have an optimizer."""
    return of_megatron(reader) or of_trainer(reader)


def trainer_run_of(reader: RunReader) -> TrainerRun:
    """A run, also Megatron's, in the words of other trainers. Raises CheckpointError where it lacks Adam's count, or
    was trained by Muon."""
    if of_trainer(reader):
        run = reader.trainer_run
        if run.muon:
            raise CheckpointError(_ONLY_MEGATRONS, where=reader.path, do=DROP_OPTIMIZER)
        return run
    assert of_megatron(reader)
    if has_muon(reader):
        why = "torch's Muon stores how it scales and orthogonalizes, which Megatron leaves to its flags"
        raise CheckpointError(f"{_ONLY_MEGATRONS}: {why}", where=reader.path, do=DROP_OPTIMIZER)
    with damage("an optimizer that is not Megatron's", reader.path, DROP_OPTIMIZER):
        step, group = _adam_of(reader)
        if step is None:
            raise CheckpointError(NO_COUNT, where=reader.path, do=DROP_OPTIMIZER)
        rates = {"initial_lr": group["max_lr"]} if "max_lr" in group else {}
        settings = adam_settings([stored_group({**group, **rates}, reader.path)], reader.path)
        return TrainerRun(
            count_of_updates(step, "a parameter", reader.path), settings, ("the schedule", "random generators")
        )


def _adam_of(reader: MegatronReader) -> tuple[Any, Mapping[str, Any]]:
    """Adam's count of updates, from where Megatron's optimizers keep it, and the group of parameters with weight decay
    (of the first of several optimizers). Raises ValueError for an optimizer that is not Megatron's."""
    found = next(iter(optimizer_settings(reader)), {})
    step, groups = step_and_groups(found)
    if found and groups is None:
        raise ValueError("no groups of parameters")
    groups = groups or [{}]
    group = next((group for group in groups if group.get("wd_mult") != 0.0), groups[0])
    return reader.iteration if step is None else step, group
