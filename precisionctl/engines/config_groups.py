"""Which of several config groups of compressed-tensors an engine decodes a linear by."""

from __future__ import annotations

from collections.abc import Mapping

from precisionctl.engines.code_rules import EXPERT
from precisionctl.engines.ignore_lists import BY_NAME_OR_REGEX, is_of_a_class, words
from precisionctl.engines.rule import Breaches, Demand, QuantizedDirectory
from precisionctl.quant_methods.base import kind_of
from precisionctl.quant_methods.compressed_tensors import read

_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
"""What engines call the linear that they fuse these into."""


def in_another_group(*, fuses: bool, class_first: bool = False) -> Demand:
    """Weights whose codes are not what the group says that an engine takes for them, of several.

    An engine that `fuses` takes the first group with a target that means the linear that a weight's is fused into, else
    the first that means its own, else the first with a class; where linears other than experts are fused, a class
    counts before a linear's own name if it is `class_first`. One that does not fuse takes a group with a linear's whole
    name, else the first of the expressions that mean it in the order of the alphabet, else a class; and no experts are
    judged, which it decodes by another rule (`joined_tensors.py`)."""

    def broken(directory: QuantizedDirectory) -> Breaches:
        groups = directory.quantization.get("config_groups")
        if directory.method != "compressed-tensors" or not isinstance(groups, Mapping) or len(groups) < 2:
            return
        of_target = {target: name for name, group in groups.items() for target in words(group.get("targets"))}
        kinds = {name: _kinds(directory.quantization, group) for name, group in groups.items()}
        targets = of_target if fuses else sorted(of_target, key=lambda target: (target.startswith("re:"), target))
        named = BY_NAME_OR_REGEX.first(targets)
        of_class = next(filter(is_of_a_class, of_target), None)
        for weight in directory.scales:
            if not fuses and EXPERT.fullmatch(weight):
                continue
            module = weight.removesuffix(".weight")
            stem, _, linear = module.rpartition(".")
            fused = named(f"{stem}.{_FUSED[linear]}") if fuses and linear in _FUSED else None
            by_class = of_class if class_first and linear in _FUSED and not EXPERT.fullmatch(weight) else None
            target = fused or by_class or named(module) or of_class
            if target and directory.kinds[weight] not in kinds[of_target[target]]:
                codes, group = directory.kinds[weight], of_target[target]
                yield weight, f"codes of {codes}, decoded as those of config group {group}: {' or '.join(kinds[group])}"

    return broken


def _kinds(quantization: Mapping[str, object], group: object) -> list[str]:
    said = read({**quantization, "config_groups": {"": group}})
    return list(dict.fromkeys(kind_of(form, said.static) for form in said.formats))
