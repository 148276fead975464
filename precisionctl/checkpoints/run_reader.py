"""Readers that can have an optimizer, of Megatron or of another trainer, and what they say of the run in one form."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from precisionctl.checkpoints.base import Reader, has_muon
from precisionctl.checkpoints.megatron.carried_run import optimizer_settings, step_and_groups
from precisionctl.checkpoints.megatron.directory import MegatronReader, of_megatron
from precisionctl.checkpoints.other_trainers.trainer_run import (
    NO_COUNT,
    ParameterGroup,
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

_ONLY_MEGATRONS = "Muon's momentum (`momentum_buffer`), which goes to Megatron alone"
"""Why an optimizer with Muon cannot be converted to other formats."""

_MOMENTUM = ("momentum", "momentum_beta")
"""What Muon's groups in Megatron have, since core 0.17 and in 0.16, and Adam's have not."""


def of_run(reader: Reader) -> TypeGuard[RunReader]:
    """Whether a checkpoint is of a kind that can have an optimizer."""
    return of_megatron(reader) or of_trainer(reader)


def trainer_run_of(reader: RunReader) -> TrainerRun:
    """As `run_of`, to be saved in the form of another trainer. Raises CheckpointError also where it was trained by
    Muon."""
    if of_megatron(reader) and has_muon(reader):
        why = "torch's Muon stores how it scales and orthogonalizes, which Megatron leaves to its flags"
        raise CheckpointError(f"{_ONLY_MEGATRONS}: {why}", where=reader.path, do=DROP_OPTIMIZER)
    run = run_of(reader)
    if run.muon:
        raise CheckpointError(_ONLY_MEGATRONS, where=reader.path, do=DROP_OPTIMIZER)
    return run


def run_of(reader: RunReader) -> TrainerRun:
    """A run, also Megatron's, in the words of other trainers. Raises CheckpointError where it lacks Adam's count."""
    if of_trainer(reader):
        return reader.trainer_run
    assert of_megatron(reader)
    with damage("an optimizer that is not Megatron's", reader.path, DROP_OPTIMIZER):
        step, group = _adam_of(reader)
        if step is None:
            raise CheckpointError(NO_COUNT, where=reader.path, do=DROP_OPTIMIZER)
        rates = {"initial_lr": group["max_lr"]} if "max_lr" in group else {}
        settings = adam_settings([stored_group({**group, **rates}, reader.path)], reader.path)
        left = ("the schedule", "random generators")
        return TrainerRun(count_of_updates(step, "a parameter", reader.path), settings, left, _muon_of(reader))


def _adam_of(reader: MegatronReader) -> tuple[Any, Mapping[str, Any]]:
    """Adam's count of updates, from where Megatron's optimizers keep it, and the group of parameters with weight decay
    (of the first of several optimizers of this kind). Raises ValueError for an optimizer that is not Megatron's."""
    found = next((one for one in optimizer_settings(reader) if not _momentum_of(one)), {})
    step, groups = step_and_groups(found)
    if found and groups is None:
        raise ValueError("no groups of parameters")
    groups = groups or [{}]
    group = next((group for group in groups if group.get("wd_mult") != 0.0), groups[0])
    return reader.iteration if step is None else step, group


def _muon_of(reader: MegatronReader) -> Mapping[str, float]:
    """The settings of a Muon beside Adam that are known to mean the same elsewhere; empty if there is none."""
    found = [momentum for one in optimizer_settings(reader) if (momentum := _momentum_of(one))]
    return muon_settings([ParameterGroup(found[0])], reader.path, ("momentum",)) if found else {}


def _momentum_of(optimizer: object) -> Mapping[str, Any]:
    """Its momentum as a setting, if it is Muon's; else empty."""
    _, groups = step_and_groups(optimizer)
    return next(({"momentum": group[key]} for group in groups or () for key in _MOMENTUM if key in group), {})
