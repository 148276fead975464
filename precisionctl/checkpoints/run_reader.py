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
        optimizers = optimizer_settings(reader)
        adam = next((one for one in optimizers if not _momentum_of(one)), {})  # the first of several
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
        momentums = [momentum for one in optimizers if (momentum := _momentum_of(one))]
        muon = muon_settings([ParameterGroup(momentums[0])], reader.path, ("momentum",)) if momentums else {}
        left = ("the schedule", "random generators")
        return TrainerRun(count_of_updates(count, "a parameter", reader.path), settings, left, muon)


def _momentum_of(optimizer: object) -> Mapping[str, Any]:
    """Its momentum as a setting, if it is Muon's; else empty."""
    _, groups = step_and_groups(optimizer)
    return next(({"momentum": group[key]} for group in groups or () for key in _MOMENTUM if key in group), {})
