"""The optimizer in a rank's file of a Megatron `torch` checkpoint: numbered states -> the parameters they are of.

As Float16OptimizerWithFloat16Params.state_dict and torch.optim write it: groups list numbers, numbers have states,
FP32 masters stand in the groups' order (megatron/core/optimizer/optimizer.py). Parameters are numbered group by
group in the order of the module tree, which is that of the state dict (`_get_param_groups`).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.megatron_legacy_names import expert_of
from precisionctl.checkpoints.megatron_logical import STATE
from precisionctl.checkpoints.torch_zip import Located, read_located
from precisionctl.errors import DamagedCheckpoint

_BUFFERS = ("expert_bias", "_extra_state")
_ENDS = ("word_embeddings.weight", "position_embeddings.weight", "output_layer.weight")
"""What `--decoupled-lr` puts into groups of its own."""


def common_optimizer(content: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The part of the optimizer that is no tensor of a parameter, as `torch_dist` has it in its common data."""
    for inner, _ in _optimizers(content, path):
        step = next((state.get("step") for state in inner.get("state", {}).values() if isinstance(state, dict)), None)
        if isinstance(step, Located):
            step = int(read_located(path, step))
        common = {} if step is None else {"common_step": step}
        return {"optimizer": {"state": common, "param_groups": inner["param_groups"]}}
    return {}


def optimizer_tensors(
    content: Mapping[str, Any], parameters: Mapping[str, Located], path: Path
) -> Iterator[tuple[str, Located]]:
    """`optimizer.state.<kind>.<parameter>` of a rank's parameters (in the order of its state dict), and where it is.

    Nothing for a distributed optimizer, which keeps its tensors in files of its own. Raises DamagedCheckpoint where
    groups and parameters do not fit together.
    """
    optimizers = list(_optimizers(content, path))
    groups = [(inner, group, masters) for inner, all_masters in optimizers for group, masters in all_masters]
    classes = [_class(group) for _, group, _ in groups]
    for (inner, group, masters), its_class in zip(groups, classes, strict=True):
        if not inner.get("state"):
            continue
        names = [name for name in parameters if _class_of(name, parameters[name], classes) == its_class]
        numbers = group.get("params", [])
        if len(names) != len(numbers) or (masters is not None and len(masters) != len(names)):
            what = f"an optimizer's group of {len(numbers)} parameters, where the model has {len(names)} such"
            raise DamagedCheckpoint(what, where=path, do="--drop-optimizer leaves the optimizer behind.")
        for index, (name, number) in enumerate(zip(names, numbers, strict=True)):
            state = inner["state"].get(number, {})
            found = {kind: value for kind, value in state.items() if kind != "step"}
            if masters is not None:
                found["param"] = masters[index]
            for kind, value in found.items():
                if not isinstance(value, Located) or value.shape != parameters[name].shape:
                    raise DamagedCheckpoint(f"the optimizer's {kind} of `{name}` is not of its shape", where=path)
                yield f"{STATE}{kind}.{name}", value


_Groups = list[tuple[Mapping[str, Any], Sequence[Any] | None]]


def _optimizers(content: Mapping[str, Any], path: Path) -> Iterator[tuple[Mapping[str, Any], _Groups]]:
    """Each optimizer's numbered states, and its groups with their masters (None where parameters are FP32)."""
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


_Class = tuple[bool, bool, bool]
"""Of experts (where they have an optimizer of their own), without weight decay, with a learning rate of its own."""


def _class(group: Mapping[str, Any]) -> _Class:
    return bool(group.get("is_expert_parallel")), group.get("wd_mult") == 0.0, bool(group.get("is_decoupled_lr"))


def _class_of(name: str, parameter: Located, classes: Sequence[_Class]) -> _Class | None:
    """Which class a parameter belongs to, among those that there are."""
    if name.endswith(_BUFFERS):
        return None
    undecayed = name.rpartition(".")[2].startswith("bias") or len(parameter.shape) == 1
    return (
        expert_of(name) is not None and any(expert for expert, _, _ in classes),
        undecayed and any(without for _, without, _ in classes),
        name.endswith(_ENDS) and any(own for _, _, own in classes),
    )
