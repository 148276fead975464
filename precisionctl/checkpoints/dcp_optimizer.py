"""The optimizer in PyTorch's checkpoints (DCP): which key is which state of which parameter.

`get_state_dict`, and so accelerate, has `optimizer.state.<parameter>.exp_avg` and numbered groups of parameters;
torchtitan makes each parameter a group. An optimizer's own state dict, as megatron-fsdp saves it, has numbers for
parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from precisionctl.checkpoints import torch_zip
from precisionctl.checkpoints.dcp import DcpTensor, Index
from precisionctl.checkpoints.numbered_optimizer import parameters_by_number
from precisionctl.checkpoints.torch_zip import Span
from precisionctl.checkpoints.trainer_run import NO_COUNT, adam_settings, lost_settings
from precisionctl.errors import DROP_OPTIMIZER, CheckpointError, damage, shown
from precisionctl.param import MOMENTS, TensorSpec

_INSIDE = r"(?:[^.]+\.){0,2}?"  # of an application's own dict
_OPTIMIZER = rf"{_INSIDE}optim(?:izers?)?\."
_STATE = re.compile(rf"{_OPTIMIZER}state\.(.+)\.(step|exp_avg|exp_avg_sq)")
_OTHER_STATE = re.compile(rf"{_OPTIMIZER}state\..+\.(\w+)")
_SETTING = re.compile(rf"{_OPTIMIZER}param_groups\.(.+)\.(lr|initial_lr|betas|eps|weight_decay)")
_PARAMETERS = re.compile(rf"{_OPTIMIZER}param_groups\.(\d{{1,9}})\.params")
_OF_RUN = re.compile(
    rf"{_INSIDE}(?:optim(?:izers?)?|(?:lr_)?schedulers?|train_state|dataloader|rng_state|extra_state)\..+"
)


@dataclass(frozen=True)
class DcpOptimizer:
    """AdamW's tensors by parameter: `moments` by kind, and the `steps` that it counts. `settings` are where each of a
    parameter group's is stored, by group. `others` are tensors that are neither, nor weights; among them may be states
    that are `numbered`, of the parameters that each group's object says (`parameters`)."""

    moments: Mapping[str, Mapping[str, DcpTensor]] = field(default_factory=dict)
    steps: Mapping[str, DcpTensor] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Span]] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    numbered: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    parameters: Mapping[int, Span] = field(default_factory=dict)

    @property
    def unread(self) -> str:
        """Kinds of state that AdamW has not, such as Muon's `momentum_buffer`, in words."""
        found = {match[1] for key in self.others if (match := _OTHER_STATE.fullmatch(key))}
        kinds = sorted(found - {"step", *MOMENTS})
        return f"{shown(kinds)}, which AdamW has not" if kinds else ""

    def updates(self, where: Path) -> int:
        """Adam's count. Raises CheckpointError where parameters differ in it, as no Megatron counts for each."""
        counts = dict[int, str]()
        for name, tensor in self.steps.items():
            span = tensor.pieces[0].span
            value = torch_zip.load(span.read(), span) if tensor.shape in ((), (1,)) else None
            with damage(f"the step of `{name}` is no number", span):
                if not isinstance(value, torch.Tensor):
                    raise TypeError
                counts.setdefault(int(value), name)
        if not counts:
            raise CheckpointError(NO_COUNT, where=where, do=DROP_OPTIMIZER)
        if len(counts) > 1 or min(counts) < 0:
            said = " and ".join(f"`{name}` {count}" for count, name in sorted(counts.items())[:2])
            raise CheckpointError(
                f"its parameters had other numbers of updates: {said}", where=where, do=DROP_OPTIMIZER
            )
        return next(iter(counts))

    def adam(self) -> Mapping[str, Any]:
        """As `adam_settings`; of the groups no more is read than it takes."""
        return adam_settings(self._groups())

    def lost_settings(self) -> tuple[str, ...]:
        """As `trainer_run.lost_settings`."""
        return lost_settings(self._groups())

    def _groups(self) -> Iterator[Mapping[str, Any]]:
        for spans in self.settings.values():
            yield {key: torch_zip.load(span.read(), span) for key, span in spans.items()}


def split_off(index: Index) -> tuple[dict[str, DcpTensor], DcpOptimizer]:
    """The weights of a checkpoint, and its optimizer."""
    weights = {key: tensor for key, tensor in index.tensors.items() if not _OF_RUN.fullmatch(key)}
    states: dict[str, dict[str, DcpTensor]] = {"step": {}, "exp_avg": {}, "exp_avg_sq": {}}
    others, settings, parameters = list[str](), dict[str, dict[str, Span]](), dict[int, Span]()
    numbered = dict[int, dict[str, str]]()
    for key, tensor in index.tensors.items():
        if key in weights:
            continue
        match = _STATE.fullmatch(key)
        if match and not match[1].isdecimal():
            states[match[2]][match[1]] = tensor
            continue
        others.append(key)
        if match and len(match[1]) < 10:
            numbered.setdefault(int(match[1]), {})[match[2]] = key
    for key, span in index.objects.items():
        if match := _SETTING.fullmatch(key):
            settings.setdefault(match[1], {})[match[2]] = span
        elif match := _PARAMETERS.fullmatch(key):
            parameters[int(match[1])] = span
    return weights, DcpOptimizer(states, states.pop("step"), settings, tuple(others), numbered, parameters)


def with_names(found: DcpOptimizer, index: Index, weights: Mapping[str, DcpTensor], where: Path) -> DcpOptimizer:
    """The optimizer with its numbered states under the names of `weights`, if the order of those is known and shapes
    fit; else as it is."""
    if not found.numbered or any(kinds.keys() != {"step", *found.moments} for kinds in found.numbered.values()):
        return found
    shapes = {number: index.tensors[kinds["exp_avg"]].shape for number, kinds in found.numbered.items()}
    specs = {name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in weights.items()}
    groups = [{"params": torch_zip.load(span.read(), span)} for _, span in sorted(found.parameters.items())]
    with damage("groups of parameters that PyTorch does not save", where):
        try:
            named = parameters_by_number(groups, shapes, specs, where)
        except CheckpointError:
            return found
        if any(len(held) > 1 for held in named.values()):  # experts, which the weights have one by one
            return found
        states = {
            kind: {name: index.tensors[found.numbered[number][kind]] for number, (name,) in named.items()}
            for kind in ("step", *found.moments)
        }
    taken = {key for kinds in found.numbered.values() for key in kinds.values()}
    others = tuple(key for key in found.others if key not in taken)
    return DcpOptimizer(states, states.pop("step"), found.settings, others)
