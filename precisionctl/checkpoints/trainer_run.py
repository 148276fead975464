"""A run of another trainer than Megatron, as far as its checkpoint tells of it: AdamW's count and settings."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.companions import parse_json
from precisionctl.checkpoints.torch_zip import Inert, LocatedTensor, read_located
from precisionctl.errors import DamagedCheckpoint, shown
from precisionctl.param import TensorSpec
from precisionctl.untrusted.safe_files import has_file, read_file

NO_COUNT = "nothing says how many updates the optimizer made"
"""Of an optimizer without Adam's count, without which no other goes on from it."""

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
        if _decays(group):
            first = group
            break
    first = first or {}
    found: dict[str, Any] = {key: float(first[key]) for key in _NUMBERS if _is_finite(first.get(key))}
    betas = first.get("betas")
    if isinstance(betas, list | tuple) and len(betas) == 2 and all(map(_is_finite, betas)):
        found["betas"] = tuple(map(float, betas))
    return found


def lost_settings(groups: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """What of the settings of groups of parameters a result has no place for, in words: it has those of one group, and
    weight decay of matrices alone."""
    keys = (*_NUMBERS, "betas")
    settings = [{key: group.get(key) for key in keys} for group in groups]
    apart = [*{repr(one): one for one in settings}.values()]  # some trainers say them for each parameter
    decays = [_decays(one) for one in apart]
    lost = [key for key in keys if len({repr(one[key]) for one in apart}) > 1]
    if sum(decays) == 1 and len(apart) == 2:  # the two groups that a result has
        lost = [key for key in lost if key != "weight_decay"]
    said = [f"groups of parameters of their own {', '.join(lost)}"] if lost else []
    return (*said, *(["weight decay of norms and biases"] if decays and all(decays) else []))


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


def _decays(group: Mapping[str, Any]) -> bool:
    return _is_finite(group.get("weight_decay")) and group["weight_decay"] > 0


def _is_finite(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 1 << 63  # others may be no float
    return isinstance(value, float) and math.isfinite(value)


def other_counts(updates: Iterable[int]) -> str:
    """In words, that Adam has counted each parameter's updates by itself: one count has no place for it."""
    return f"its parameters had different numbers of updates: {shown(sorted(updates))}"


def number(value: object, path: Path) -> int:
    """A count that may be pickled as a number, an enum of DeepSpeed's or a tensor of one element."""
    if isinstance(value, Inert) and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, LocatedTensor) and math.prod(value.shape) == 1:
        value = read_located(path, value).item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise DamagedCheckpoint(f"{shown(value)} as a number", where=path)
    return value
