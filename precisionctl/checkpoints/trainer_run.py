"""A run of another trainer than Megatron, as far as its checkpoint tells of it: AdamW's count and settings."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.companions import parse_json
from precisionctl.errors import DamagedCheckpoint
from precisionctl.param import TensorSpec
from precisionctl.untrusted.safe_files import has_file, read_file

_NUMBERS = ("lr", "initial_lr", "eps", "weight_decay")


@dataclass(frozen=True)
class TrainerRun:
    """What a trainer saves of a run beside tensors.

    `updates` is Adam's count, the same for all parameters. `settings` are AdamW's where weights decay, as far as they
    are stored: `lr` of the last update, `initial_lr` before any schedule, `betas`, `eps`, `weight_decay`. `left` says
    what stays behind, in words.
    """

    updates: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    left: tuple[str, ...] = ()


class TrainedReader(Reader, Protocol):
    """A Reader with Hugging Face's names that has an optimizer: `optimizer.state.<kind>.<tensor>` are
    `optimizer_specs`, and `chunks` serves both. A tensor without a master is its own."""

    @property
    def optimizer_specs(self) -> Mapping[str, TensorSpec]:
        """The optimizer's tensors; empty if there is none that can be read."""
        ...

    @property
    def trainer_run(self) -> TrainerRun:
        """What is beside them. Raises CheckpointError where it contradicts itself, or lacks the count of updates."""
        ...


def of_trainer(reader: Reader) -> TypeGuard[TrainedReader]:
    """Whether a checkpoint is another trainer's than Megatron's, of a kind that can have an optimizer."""
    return reader.layout == "hf" and hasattr(type(reader), "trainer_run")


def adam_settings(groups: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """AdamW's settings for weights: those of the first group of parameters that decays, as trainers give norms and
    biases no decay, else of the first. Whatever is no finite number is left out."""
    first: Mapping[str, Any] | None = None
    for group in groups:
        first = group if first is None else first
        if _is_finite(group.get("weight_decay")) and group["weight_decay"] > 0:
            first = group
            break
    first = first or {}
    found: dict[str, Any] = {key: float(first[key]) for key in _NUMBERS if _is_finite(first.get(key))}
    betas = first.get("betas")
    if isinstance(betas, list | tuple) and len(betas) == 2 and all(map(_is_finite, betas)):
        found["betas"] = tuple(map(float, betas))
    return found


_STATE = "trainer_state.json"


def trainer_step(path: Path) -> int | None:
    """The step that Hugging Face's Trainer has written of a checkpoint; None where it has written none. Raises
    DamagedCheckpoint for one that is no number."""
    if not has_file(path / _STATE, path):
        return None
    step = parse_json(read_file(path / _STATE, path), path / _STATE).get("global_step")
    if type(step) is not int or not 0 <= step < 1 << 63:
        raise DamagedCheckpoint("it names no step", where=path / _STATE)
    return step


def _is_finite(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 1 << 63  # others may be no float
    return isinstance(value, float) and math.isfinite(value)
