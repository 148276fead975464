"""The optimizer in PyTorch's checkpoints (DCP): which key is which state of which parameter.

`get_state_dict`, and so accelerate, has `optimizer.state.<parameter>.exp_avg` and numbered groups of parameters;
torchtitan makes each parameter a group.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from precisionctl.checkpoints import torch_zip
from precisionctl.checkpoints.dcp import DcpTensor, Index
from precisionctl.checkpoints.torch_zip import Span
from precisionctl.checkpoints.trainer_run import adam_settings, lost_settings
from precisionctl.errors import CheckpointError, damage

_INSIDE = r"(?:[^.]+\.){0,2}?"  # of an application's own dict
_OPTIMIZER = rf"{_INSIDE}optim(?:izers?)?\."
_STATE = re.compile(rf"{_OPTIMIZER}state\.(.+)\.(step|exp_avg|exp_avg_sq)")
_SETTING = re.compile(rf"{_OPTIMIZER}param_groups\.(.+)\.(lr|initial_lr|betas|eps|weight_decay)")
_OF_RUN = re.compile(
    rf"{_INSIDE}(?:optim(?:izers?)?|(?:lr_)?schedulers?|train_state|dataloader|rng_state|extra_state)\..+"
)


@dataclass(frozen=True)
class DcpOptimizer:
    """AdamW's tensors by parameter: `moments` by kind, and the `steps` that it counts. `settings` are where each of a
    parameter group's is stored, by group. `others` are tensors that are neither, nor weights."""

    moments: Mapping[str, Mapping[str, DcpTensor]] = field(default_factory=dict)
    steps: Mapping[str, DcpTensor] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Span]] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    def updates(self, where: Path) -> int:
        """Adam's count. Raises CheckpointError where parameters differ in it, as no Megatron counts for each."""
        counts = dict[int, str]()
        for name, tensor in self.steps.items():
            span = tensor.pieces[0].span
            value = torch_zip.load(span.read(), span) if tensor.shape in ((), (1,)) else None
            with damage(f"the step of `{name}` is no number", span):
                if not isinstance(value, Tensor):
                    raise TypeError
                counts.setdefault(int(value), name)
        do = "--drop-optimizer leaves the optimizer behind."
        if not counts:
            raise CheckpointError("nothing says how many updates the optimizer made", where=where, do=do)
        if len(counts) > 1 or min(counts) < 0:
            said = " and ".join(f"`{name}` {count}" for count, name in sorted(counts.items())[:2])
            raise CheckpointError(f"its parameters had other numbers of updates: {said}", where=where, do=do)
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
    others, settings = list[str](), dict[str, dict[str, Span]]()
    for key, tensor in index.tensors.items():
        if key in weights:
            continue
        if (match := _STATE.fullmatch(key)) and not match[1].isdigit():
            states[match[2]][match[1]] = tensor
        else:
            others.append(key)
    for key, span in index.objects.items():
        if match := _SETTING.fullmatch(key):
            settings.setdefault(match[1], {})[match[2]] = span
    return weights, DcpOptimizer(states, states.pop("step"), settings, tuple(others))
