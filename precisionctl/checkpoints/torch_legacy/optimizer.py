"""The optimizer in a rank's file of a Megatron `torch` checkpoint, whose states are numbered: which parameter is which.

As Float16OptimizerWithFloat16Params.state_dict and torch.optim write it (megatron/core/optimizer/optimizer.py): each
parameter group lists the numbers of its parameters, `state` is keyed by number, and the FP32 master weights are in the
order of the groups. Parameters are numbered group by group in the order of the module tree, which is that of the state
dict (`_get_param_groups`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.megatron.carried_run import step_and_groups
from precisionctl.checkpoints.megatron.keys import expert_of
from precisionctl.checkpoints.torch_files.torch_zip import LocatedTensor, read_located
from precisionctl.checkpoints.torch_files.torch_zip_writer import Blank, SmallTensor
from precisionctl.errors import DROP_OPTIMIZER, DamagedCheckpoint
from precisionctl.param import MOMENTS, NOT_TRAINED, state_name
from precisionctl.torch_when_used import is_tensor

NO_OPTIMIZER = "its optimizer is not what PyTorch saves"
NO_PARAMETERS = (*NOT_TRAINED, "_extra_state")
"""Ends of names in a state dict that are not parameters, so that no optimizer has them."""
_DECOUPLED = ("word_embeddings.weight", "position_embeddings.weight", "output_layer.weight")
"""Suffixes of parameters that `--decoupled-lr` puts into parameter groups of their own."""


def common_optimizer(content: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The optimizer without the tensors of parameters: its step and parameter groups, in the form that `torch_dist`
    has in its common data. Empty if nothing was saved. Raises DamagedCheckpoint for an optimizer without groups."""
    for inner, _ in _optimizers(content, path):
        step = next((state.get("step") for state in inner.get("state", {}).values() if isinstance(state, dict)), None)
        if isinstance(step, LocatedTensor) and math.prod(step.shape) == 1:
            step = int(read_located(path, step))
        common = {"common_step": step} if isinstance(step, int | float) and abs(step) < 1 << 63 else {}
        return {"optimizer": {"state": common, "param_groups": inner["param_groups"]}}
    return {}


def optimizer_tensors(
    content: Mapping[str, Any], stages: Sequence[Mapping[str, LocatedTensor]], path: Path
) -> Iterator[tuple[str, LocatedTensor]]:
    """Locate the optimizer's tensors in a rank's file: pairs of the name `optimizer.state.<kind>.<parameter>` and the
    place in the file.

    `content` is the rank's file without tensors, `stages` the parameters of each pipeline stage on the rank, in the
    order of its state dict. Yields nothing for a distributed optimizer, which has a file of its own (buckets.py).
    Raises DamagedCheckpoint where groups and parameters do not match.
    """
    parameters = {name: tensor for stage in stages for name, tensor in stage.items()}
    optimizers = list(_optimizers(content, path))
    groups = [(inner, group, masters) for inner, all_masters in optimizers for group, masters in all_masters]
    # Whether a group is of experts (where they have an optimizer of their own), has no weight decay, and has a learning
    # rate of its own. Of a parameter each counts only if some group is set apart by it
    classes = [
        (bool(group.get("is_expert_parallel")), group.get("wd_mult") == 0.0, bool(group.get("is_decoupled_lr")))
        for _, group, _ in groups
    ]
    experts_apart, undecayed_apart, decoupled_apart = (any(one[at] for one in classes) for at in range(3))
    by_class: dict[tuple[bool, bool, bool], list[str]] = {}
    for name, tensor in parameters.items():
        its_class = (
            experts_apart and expert_of(name) is not None,
            undecayed_apart and _is_undecayed(name, tensor.shape),
            decoupled_apart and name.endswith(_DECOUPLED),
        )
        by_class.setdefault(its_class, []).append(name)

    for (inner, group, masters), its_class in zip(groups, classes, strict=True):
        if not inner.get("state"):
            continue
        names = by_class.get(its_class, [])
        numbers = group.get("params", [])
        if len(names) != len(numbers) or (masters is not None and len(masters) != len(names)):
            what = f"an optimizer's group of {len(numbers)} parameters, where the model has {len(names)} such"
            raise DamagedCheckpoint(what, where=path, do=DROP_OPTIMIZER)
        for index, (name, number) in enumerate(zip(names, numbers, strict=True)):
            state = inner["state"].get(number, {})
            found = {kind: value for kind, value in state.items() if kind != "step"}
            if masters is not None:
                found["param"] = masters[index]
            for kind, value in found.items():
                if not isinstance(value, LocatedTensor) or value.shape != parameters[name].shape:
                    raise DamagedCheckpoint(f"the optimizer's {kind} of `{name}` is not of its shape", where=path)
                yield state_name(kind, name), value


def optimizer_state(
    stages: Sequence[Mapping[str, Blank]],
    tensors: Mapping[tuple[str, int, str], Blank],
    settings: object,
    apart: bool,
) -> object:
    """What the optimizer of a rank with these stages saves: a dict, or a list of two (dense, experts).

    `tensors` are keyed by kind, stage and parameter. `settings` is `optimizer` in the common data of the checkpoint
    that is converted; groups get their learning rates and so on from it. `apart`: experts have an optimizer of their
    own, as with expert parallelism.
    """
    parameters = [
        (stage, name, blank)
        for stage, found in enumerate(stages)
        for name, blank in found.items()
        if not name.endswith(NO_PARAMETERS)
    ]
    # common data are one optimizer's, or a dict of several by number
    known_step, known_groups = step_and_groups(settings.get(0, settings) if isinstance(settings, dict) else None)
    groups = known_groups or []
    step = float(known_step) if isinstance(known_step, int | float) or is_tensor(known_step) else None
    if not apart:
        return _optimizer_of(parameters, tensors, groups, step, experts=False)
    dense = [entry for entry in parameters if expert_of(entry[1]) is None]
    experts = [entry for entry in parameters if expert_of(entry[1]) is not None]
    found = [_optimizer_of(each, tensors, groups, step, experts=each is experts) for each in (dense, experts) if each]
    return found if len(found) > 1 else found[0]


def _optimizer_of(
    parameters: Sequence[tuple[int, str, Blank]],
    tensors: Mapping[tuple[str, int, str], Blank],
    known: Sequence[Mapping[str, Any]],
    step: float | None,
    *,
    experts: bool,
) -> dict[str, object]:
    """The state dict of one optimizer with these parameters; `known` are the parameter groups to take settings from."""
    groups: list[dict[str, object]] = []
    masters: list[list[Blank]] = []
    states: dict[int, dict[str, object]] = {}
    spares_norms = not known or any(group.get("wd_mult") == 0.0 for group in known)  # else all are in one group
    for undecayed in (False, True):
        members = [
            entry for entry in parameters if (spares_norms and _is_undecayed(entry[1], entry[2].shape)) == undecayed
        ]
        if not members:
            continue
        same = [group for group in known if (group.get("wd_mult") == 0.0) == undecayed] or list(known[:1])
        group = {"wd_mult": float(not undecayed), "lr_mult": 1.0, "is_decoupled_lr": False, **(same[0] if same else {})}
        numbers = list(range(len(states), len(states) + len(members)))
        groups.append(group | {"is_expert_parallel": experts, "params": numbers})
        masters.append(
            [tensors["param", stage, name] for stage, name, _ in members if ("param", stage, name) in tensors]
        )
        for number, (stage, name, _) in zip(numbers, members, strict=True):
            found = {kind: tensors[kind, stage, name] for kind in MOMENTS if (kind, stage, name) in tensors}
            states[number] = {} if step is None else {"step": SmallTensor.of(step)}
            states[number] |= found
    inner: dict[str, object] = {"state": states, "param_groups": groups}
    return {"optimizer": inner, "fp32_from_fp16_params": masters} if any(masters) else inner


def _is_undecayed(name: str, shape: Sequence[int]) -> bool:
    """Whether Megatron gives a parameter no weight decay: biases, and parameters of one dimension."""
    return name.rpartition(".")[2].startswith("bias") or len(shape) == 1


_Groups = list[tuple[Mapping[str, Any], Sequence[Any] | None]]


def _optimizers(content: Mapping[str, Any], path: Path) -> Iterator[tuple[Mapping[str, Any], _Groups]]:
    """Each optimizer's state dict, and its groups with their FP32 master weights (None where parameters are FP32)."""
    found = content.get("optimizer") or []
    for saved in found if isinstance(found, list) else [found]:  # a list where there are several (dense and experts)
        inner = saved.get("optimizer", saved) if isinstance(saved, dict) else None
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        if inner is None or not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise DamagedCheckpoint("its optimizer has no groups of parameters", where=path)
        masters = saved.get("fp32_from_fp16_params")
        if masters is not None and (not isinstance(masters, list) or len(masters) != len(groups)):
            raise DamagedCheckpoint("its optimizer has not as many groups as FP32 masters", where=path)
        yield inner, list(zip(groups, masters or [None] * len(groups), strict=True))
