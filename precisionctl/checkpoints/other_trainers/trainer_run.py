"""A run of another trainer than Megatron, as far as its checkpoint tells of it: AdamW's count and settings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.torch_files.torch_zip import Inert, LocatedTensor, read_located
from precisionctl.errors import DROP_OPTIMIZER, DamagedCheckpoint, shown
from precisionctl.param import MOMENTS, TensorSpec
from precisionctl.sizes import counted
from precisionctl.torch_when_used import is_tensor
from precisionctl.untrusted.safe_files import has_file, read_json
from precisionctl.untrusted.safe_pickle import is_count

NO_COUNT = "nothing says how many updates the optimizer made"
"""The error for an optimizer without AdamW's count, with which no other optimizer can continue."""

DIFFERENT_COUNTS = "its parameters had different numbers of updates"
"""The error for an optimizer whose parameters have different counts, where the result has one count for all."""

NO_SCHEDULE = "the schedule of learning rates, whose kind is not stored"
OF_THE_LOOP = ("random generators", "the order of data")
"""What is never carried over from another trainer's run, for `TrainerRun.left`."""

_NUMBERS = ("lr", "initial_lr", "eps", "weight_decay")

ADAMW_SETTINGS = ("lr", "betas", "eps", "weight_decay", "initial_lr")
"""What a parameter group of torch.optim.AdamW has when a scheduler of PyTorch follows it."""

_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""torch.optim.AdamW's."""


@dataclass(frozen=True)
class TrainerRun:
    """What a trainer saves of a run besides tensors.

    `updates` is AdamW's count, the same for all parameters. `settings` are AdamW's, of the parameters with weight
    decay, as far as they are stored: `lr` of the last update, `initial_lr` before any schedule, `betas`, `eps`,
    `weight_decay`. `left` says in words what is not carried over. `muon` has `lr`, `weight_decay` and `momentum` of
    torch's Muon or Megatron's, and perhaps `initial_lr`, if it trained some parameters; Megatron's may lack rates.
    """

    updates: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    muon: Mapping[str, float] = field(default_factory=dict)

    def defaults(self, needed: Sequence[str]) -> Mapping[str, Any]:
        """PyTorch's defaults of those `needed` settings that nothing says. `initial_lr` is `lr`, as a scheduler of
        PyTorch sets it when it begins."""
        known = {**_DEFAULTS, **self.settings}
        known.setdefault("initial_lr", known["lr"])
        return {key: known[key] for key in needed if key not in self.settings}


class TrainedReader(Reader, Protocol):
    """A Reader with Hugging Face's names that has an optimizer: `optimizer.state.<kind>.<tensor>` are
    `optimizer_specs`, and `chunks` serves both. A tensor without a master is its own."""

    @property
    def optimizer_specs(self) -> Mapping[str, TensorSpec]:
        """The optimizer's tensors; empty if there is none that can be read."""
        ...

    @property
    def unsupported_state(self) -> str:
        """In words, the parts of an optimizer that are not read; empty if there are none."""
        ...

    @property
    def trainer_run(self) -> TrainerRun:
        """The run's state besides tensors. Raises CheckpointError if it contradicts itself, or lacks the count of
        updates."""
        ...


def of_trainer(reader: Reader) -> TypeGuard[TrainedReader]:
    """Whether a checkpoint is another trainer's than Megatron's, of a kind that can have an optimizer."""
    return reader.layout == "hf" and hasattr(type(reader), "trainer_run")


@dataclass(frozen=True)
class ParameterGroup:
    """The `settings` of a group of parameters as they are stored, and the `shapes` of these by name, None where no file
    says which they are."""

    settings: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]] | None = None

    @property
    def of_muon(self) -> bool:
        """Whether torch's Muon trained this group. No other optimizer has this setting; SGD and other implementations
        of Muon also have momentum, but use it differently."""
        return "adjust_lr_fn" in self.settings

    @property
    def has_decay(self) -> bool:
        decay = self.settings.get("weight_decay")
        return _is_number(decay) and decay > 0

    def matrices(self, *, others: bool = False) -> list[str]:
        """The names of the group's parameters that decay in most trainers; with `others`, of those that do not."""
        return [name for name, shape in (self.shapes or {}).items() if decays(name, shape) != others]


def decays(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter has weight decay in most trainers: matrices and stacks of matrices have it, norms and biases,
    stacks of biases too, do not."""
    return len(shape) > 1 and not name.endswith("bias")


def stored_group(
    settings: Mapping[str, Any], path: Path, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> ParameterGroup:
    """A group as it is in the file `path`, where each number may be a tensor of one element."""
    numbers = {key: _element(settings[key], path) for key in (*_NUMBERS, "momentum") if key in settings}
    betas = settings.get("betas")
    if isinstance(betas, list | tuple) and len(betas) == 2:
        numbers["betas"] = tuple(_element(beta, path) for beta in betas)
    return ParameterGroup({**settings, **numbers}, shapes)


def with_parameters(groups: Iterable[ParameterGroup]) -> list[ParameterGroup]:
    """Without groups that are known to be empty, whose settings are nothing's."""
    return [group for group in groups if group.shapes is None or group.shapes]


def adam_run(updates: int, groups: Sequence[ParameterGroup], where: Path, *left: str) -> TrainerRun:
    """The run of a trainer with AdamW; `left` says in words what of the run is not carried over. Raises as
    `adam_settings`."""
    lost = (NO_SCHEDULE, *left, *OF_THE_LOOP, *lost_settings(groups))
    return TrainerRun(updates, adam_settings(groups, where), lost)


def adam_settings(groups: Sequence[ParameterGroup], where: Path) -> Mapping[str, Any]:
    """AdamW's settings of a run: those that apply to most parameters with weight decay, or, if no group has any, to
    most parameters. (Trainers give norms and biases no weight decay.)

    Raises DamagedCheckpoint if any group with parameters has settings that AdamW does not accept.
    """
    found = [(group, _numbers(group, (*_NUMBERS, "betas"), "AdamW", where)) for group in with_parameters(groups)]
    return _of_most([one for one in found if one[0].has_decay] or found)


def muon_settings(
    groups: Sequence[ParameterGroup], where: Path, needed: Sequence[str] = ("lr", "weight_decay", "momentum")
) -> Mapping[str, float]:
    """The settings that torch's Muon and Megatron's both store with the same meaning, as most parameters have them.

    Raises DamagedCheckpoint if any group with parameters lacks one that is `needed`, or has one that Muon does not
    accept.
    """
    keys = ("lr", "weight_decay", "momentum", "initial_lr")
    return _of_most([(one, _numbers(one, keys, "Muon", where, needed)) for one in with_parameters(groups)])


def _of_most(found: Sequence[tuple[ParameterGroup, Mapping[str, Any]]]) -> Mapping[str, Any]:
    """The settings that apply to the largest number of parameters."""
    sizes: dict[str, int] = Counter()  # some trainers make each parameter a group
    for group, settings in found:
        sizes[repr(settings)] += len(group.shapes or ())
    return max((settings for _, settings in found), key=lambda one: sizes[repr(one)], default={})


def _numbers(
    group: ParameterGroup, keys: Sequence[str], optimizer: str, where: Path, needed: Sequence[str] = ()
) -> Mapping[str, Any]:
    """The numbers that a group has of these settings. Raises DamagedCheckpoint for what its optimizer does not take."""
    stored = {key: group.settings.get(key) for key in keys}
    found: dict[str, Any] = {key: value for key, value in stored.items() if value is not None or key in needed}
    for key, value in found.items():
        numbers, limit = value if key == "betas" else (value,), 1 if key in ("betas", "momentum") else 1 << 63
        pair = key != "betas" or (isinstance(value, list | tuple) and len(value) == 2)
        if not pair or not all(_is_number(number) and 0 <= number < limit for number in numbers):
            what = f"its optimizer's {key} is {_said(value)}, which {optimizer} does not take"
            raise DamagedCheckpoint(what, where=where, do=DROP_OPTIMIZER)
    return {key: tuple(map(float, value)) if key == "betas" else float(value) for key, value in found.items()}


def lost_settings(groups: Sequence[ParameterGroup]) -> tuple[str, ...]:
    """In words, which settings of these groups are lost in a result, which has one group's settings for all parameters,
    and weight decay for exactly the matrices."""
    groups = with_parameters(groups)
    decaying, spared = ([group for group in groups if group.has_decay == does] for does in (True, False))
    values = {key: {repr(group.settings.get(key)) for group in groups} for key in (*_NUMBERS, "betas")}
    values["weight_decay"] = {repr(group.settings["weight_decay"]) for group in decaying}
    lost = [key for key, found in values.items() if len(found) > 1]
    words = [f"different {', '.join(lost)} for groups of parameters"] if lost else []
    unknown = any(group.shapes is None for group in groups)
    if any(group.matrices(others=True) for group in decaying) or (unknown and decaying and not spared):
        words.append("weight decay of norms and biases")
    if decaying and (undecayed := [name for group in spared for name in group.matrices()]):
        others = len(undecayed) - 1
        more = f" and {counted(others, 'more matrix', 'more matrices')} do" if others else " does"
        words.append(f"that `{undecayed[0]}`{more} not decay")
    if any(group.settings.get("decoupled_weight_decay") is False for group in decaying):
        words.append("weight decay as part of the gradients, as torch.optim.Adam's")
    if any(group.settings.get("maximize") is True for group in groups):
        words.append("that it maximizes")
    return tuple(words)


_STATE = "trainer_state.json"


def trainer_step(path: Path) -> int | None:
    """The step that Hugging Face's Trainer has written of a checkpoint; None where it has written none. Raises
    DamagedCheckpoint for one that is no number."""
    if not has_file(path / _STATE, path):
        return None
    step = read_json(path / _STATE, path).get("global_step")
    if not is_count(step):
        raise DamagedCheckpoint("it names no step", where=path / _STATE)
    return step


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def not_adams(kinds: Iterable[object]) -> str:
    """In words, which of these kinds of state are not AdamW's; empty if all are."""
    others = sorted(map(str, set(kinds) - {"step", *MOMENTS}))
    return f"{shown(others)}, which AdamW has not" if others else ""


def different_counts(updates: Iterable[int]) -> str:
    """DIFFERENT_COUNTS, with the counts."""
    return f"{DIFFERENT_COUNTS}: {shown(sorted(updates))}"


def number(value: object, path: Path) -> int:
    """A count that may be pickled as a number, an enum of DeepSpeed's or a tensor of one element."""
    if isinstance(value, Inert) and len(value.args) == 1:
        value = value.args[0]
    value = _element(value, path)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not is_count(value):
        raise DamagedCheckpoint(f"{_said(value)} as a number", where=path)
    return value


def count_of_updates(step: object, parameter: str, path: Path) -> int:
    """Adam's `step` of a parameter, as `number`."""
    try:
        return number(step, path)
    except DamagedCheckpoint as error:
        what = f"the step of {parameter} is no count of updates: {error.what}"
        raise DamagedCheckpoint(what, where=path, do=DROP_OPTIMIZER) from error


def _element(value: Any, path: Path) -> Any:
    """A setting as it is in the file `path`; of a tensor of one element this."""
    if isinstance(value, LocatedTensor) and math.prod(value.shape) == 1:
        return read_located(path, value).item()
    if is_tensor(value) and value.numel() == 1:
        return value.item()
    return value


def _said(value: Any) -> str:
    if isinstance(value, LocatedTensor) or is_tensor(value):
        return f"a tensor of shape {list(value.shape)}"
    return shown(value)
