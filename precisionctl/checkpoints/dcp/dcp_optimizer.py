"""The optimizer in PyTorch's checkpoints (DCP): which key is which state of which parameter.

`get_state_dict`, and so accelerate, has `optimizer.state.<parameter>.exp_avg` and numbered groups of parameters;
torchtitan makes each parameter a group. An optimizer's own state dict, as megatron-fsdp saves it, has numbers for
parameters. A program may have several optimizers; PyTorch Lightning's are `optimizer_0`, `optimizer_1` and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from precisionctl.checkpoints.other_trainers.numbered_optimizer import parameters_by_number
from precisionctl.checkpoints.other_trainers.trainer_directory import both_are
from precisionctl.checkpoints.other_trainers.trainer_run import (
    DIFFERENT_COUNTS,
    NO_COUNT,
    ParameterGroup,
    count_of_updates,
    not_adams,
    stored_group,
)
from precisionctl.checkpoints.torch_files import torch_zip
from precisionctl.checkpoints.torch_files.dcp_metadata import DcpTensor, Index
from precisionctl.checkpoints.torch_files.torch_zip import Span
from precisionctl.errors import DROP_OPTIMIZER, CheckpointError, damage
from precisionctl.param import MOMENTS, MOMENTUM, TensorSpec
from precisionctl.sizes import listed

_INSIDE = r"(?:[^.]+\.){0,2}?"  # the keys under which a program saves model and optimizer
_OPTIM = r"optim(?:izers?)?(?:_\d+)?"
_OPTIMIZER = rf"({_INSIDE}{_OPTIM})\."
_STATE = re.compile(rf"{_OPTIMIZER}state\.(.+)\.(step|exp_avg|exp_avg_sq|momentum_buffer)")
_OTHER_STATE = re.compile(rf"{_OPTIMIZER}state\..+\.(\w+)")
_SETTINGS = "lr|initial_lr|betas|eps|weight_decay|momentum|adjust_lr_fn|maximize|decoupled_weight_decay"
_SETTING = re.compile(rf"{_OPTIMIZER}param_groups\.(.+)\.({_SETTINGS})")
_PARAMETERS = re.compile(rf"{_OPTIMIZER}param_groups\.(\d{{1,9}})\.params")
_OF_RUN = re.compile(rf"{_INSIDE}(?:{_OPTIM}|(?:lr_)?schedulers?|train_state|dataloader|rng_state|extra_state)\..+")

_LONGEST = 10
"""More digits than the number of a parameter has."""

Group: TypeAlias = tuple[str, str]
"""A parameter group: its optimizer's key, and its own in that: a number, or in torchtitan its parameter's name."""


@dataclass(frozen=True)
class DcpOptimizer:
    """The optimizer in a DCP checkpoint, which is at `where`, by parameter name.

    `moments` are AdamW's (and Muon's) tensors by kind, and `steps` AdamW's counts of updates. `settings` has, for each
    parameter group, where each setting is stored. `parameters` has, for each group, where the list of its parameters is
    stored: names or numbers; `names` are the names of the numbers. `others` are tensors that are neither weights nor
    AdamW's; those whose parameters have numbers are also in `numbered`, by optimizer. `unread` says in words why an
    optimizer that is there cannot be read; empty if it can.
    """

    where: Path
    moments: Mapping[str, Mapping[str, DcpTensor]]
    steps: Mapping[str, DcpTensor]
    settings: Mapping[Group, Mapping[str, Span]]
    others: tuple[str, ...]
    numbered: Mapping[str, Mapping[int, Mapping[str, str]]]
    parameters: Mapping[Group, Span]
    names: Mapping[int, str] = field(default_factory=dict)
    unread: str = ""

    @cached_property  # it opens an archive of each parameter
    def updates(self) -> int:
        """AdamW's count of updates. Raises CheckpointError if there is none, or none of some parameters, or if it
        differs between parameters (Megatron has one count for all), or is in safetensors, where no trainer has it; and
        DamagedCheckpoint if it is no count."""
        counts = dict[int, str]()
        for name, tensor in self.steps.items():
            span = tensor.pieces[0].span
            if tensor.pieces[0].bare:
                raise CheckpointError(
                    "an optimizer in safetensors, which is not read", where=self.where, do=DROP_OPTIMIZER
                )
            step = torch_zip.skeleton_at(span) if len(tensor.pieces) == 1 else None
            counts.setdefault(count_of_updates(step, f"`{name}`", span.path), name)
        if not counts:
            raise CheckpointError(NO_COUNT, where=self.where, do=DROP_OPTIMIZER)
        if len(counts) > 1:
            examples = " and ".join(f"`{name}` {count}" for count, name in sorted(counts.items())[:2])
            raise CheckpointError(f"{DIFFERENT_COUNTS}: {examples}", where=self.where, do=DROP_OPTIMIZER)
        if uncounted := self.moments[MOMENTS[0]].keys() - self.steps.keys():
            what = f"nothing says how many updates the optimizer made of `{min(uncounted)}`"
            raise CheckpointError(what, where=self.where, do=DROP_OPTIMIZER)
        return next(iter(counts))

    def groups(self) -> Iterator[ParameterGroup]:
        """The parameter groups. In torchtitan each parameter is a group, which is named after it."""
        trained = {**self.moments.get(MOMENTS[0], {}), **self.moments.get(MOMENTUM, {})}
        for group, spans in self.settings.items():
            stored = {key: torch_zip.load(span.read(), span) for key, span in spans.items()}
            names = [group[1]]
            if span := self.parameters.get(group):
                with damage("a group of parameters that PyTorch does not save", span):
                    names = [self.names.get(one, one) for one in torch_zip.load(span.read(), span)]
            known = all(name in trained for name in names)
            shapes = {name: trained[name].shape for name in names} if known else None
            yield stored_group(stored, next(iter(spans.values())).path, shapes)


def split_off(index: Index, where: Path) -> tuple[dict[str, DcpTensor], DcpOptimizer]:
    """The weights of a checkpoint, and what its optimizers hold together. Raises DamagedCheckpoint where two of these
    have state of one parameter."""
    weights = {key: tensor for key, tensor in index.tensors.items() if not _OF_RUN.fullmatch(key)}
    states: dict[str, dict[str, DcpTensor]] = {kind: {} for kind in ("step", *MOMENTS, MOMENTUM)}
    others, settings, parameters = list[str](), dict[Group, dict[str, Span]](), dict[Group, Span]()
    numbered, seen = dict[str, dict[int, dict[str, str]]](), dict[tuple[str, str], str]()
    for key, tensor in index.tensors.items():
        if key in weights:
            continue
        if (setting := _SETTING.fullmatch(key)) and tensor.shape in ((), (1,)):
            settings.setdefault((setting[1], setting[2]), {})[setting[3]] = tensor.pieces[0].span
            continue
        match = _STATE.fullmatch(key)
        if match and not match[2].isdecimal():
            if (other := seen.setdefault((match[2], match[3]), key)) is not key:
                raise both_are(other, key, f"{match[3]} of {match[2]}", where)
            states[match[3]][match[2]] = tensor
            continue
        others.append(key)
        if match and len(match[2]) < _LONGEST:
            numbered.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = key
    for key, span in index.objects.items():
        if match := _SETTING.fullmatch(key):
            settings.setdefault((match[1], match[2]), {})[match[3]] = span
        elif match := _PARAMETERS.fullmatch(key):
            parameters[match[1], match[2]] = span
    steps = states.pop("step")
    found = DcpOptimizer(where, states, steps, settings, tuple(others), numbered, parameters)
    return weights, replace(found, unread=_unread(found))


def under_a_key(index: Index) -> Index:
    """What is in the directory of an optimizer, as if it were beside a model's tensors: LLaMA-Factory saves its state
    there without a key above it."""
    if not all(key.startswith(("state.", "param_groups.")) for key in (*index.tensors, *index.objects)):
        return index
    tensors = {f"optimizer.{key}": one for key, one in index.tensors.items()}
    objects = {f"optimizer.{key}": one for key, one in index.objects.items()}
    return replace(index, tensors=tensors, objects=objects)


def _unread(found: DcpOptimizer) -> str:
    """In words, why an optimizer cannot be read, whatever the model is; empty if that is not so."""
    kinds = {key: match[2] for key in found.others if (match := _OTHER_STATE.fullmatch(key))}
    if others := not_adams(kinds.values()):
        return f"its optimizer has {others}"
    numbered = {key for states in found.numbered.values() for one in states.values() for key in one.values()}
    if odd := [key for key in kinds if key not in numbered]:
        return f"`{odd[0]:.90}` is of a parameter with a number that no optimizer has"
    if len(found.numbered) > 1:
        both = listed(f"`{one}`" for one in found.numbered)
        return f"{both} number their parameters, and nothing says which they are"
    if found.numbered and any(found.moments.values()):
        return f"`{next(iter(found.numbered))}` has numbers for parameters, and another optimizer has names"
    for states in found.numbered.values():
        for number, kinds_there in sorted(states.items()):
            if lacking := [kind for kind in ("step", *MOMENTS) if kind not in kinds_there]:
                return f"the optimizer's state of parameter {number} has no `{lacking[0]}`"
    return ""


def with_names(
    found: DcpOptimizer, index: Index, weights: Mapping[str, DcpTensor], behind: Mapping[str, str]
) -> DcpOptimizer:
    """The optimizer with its numbered states under the names of `weights`, or with the reason that it is `unread`: the
    order of those is not known, or shapes do not fit. `behind` is as for parameter_order."""
    if not found.numbered or found.unread:
        return found
    (numbered,) = found.numbered.values()
    shapes = {number: index.tensors[kinds["exp_avg"]].shape for number, kinds in numbered.items()}
    specs = {name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in weights.items()}
    ordered = [span for _, span in sorted(found.parameters.items(), key=lambda item: int(item[0][1]))]
    groups = [{"params": torch_zip.load(span.read(), span)} for span in ordered]
    with damage("groups of parameters that PyTorch does not save", found.where):
        try:
            named = parameters_by_number(groups, shapes, specs, behind, found.where)
        except CheckpointError as error:
            return replace(found, unread=error.what)
        if stacked := [held for held in named.values() if len(held) > 1]:
            what = (
                f"its optimizer has `{stacked[0][0]}` and its like in one tensor, and the weights have them one by one"
            )
            return replace(found, unread=what)
        states = {
            kind: {name: index.tensors[numbered[number][kind]] for number, (name,) in named.items()}
            for kind in ("step", *MOMENTS)
        }
    taken = {key for kinds in numbered.values() for key in kinds.values()}
    others = tuple(key for key in found.others if key not in taken)
    names = {number: name for number, (name,) in named.items()}
    steps = states.pop("step")
    return replace(found, moments=states, steps=steps, others=others, numbered={}, names=names)
