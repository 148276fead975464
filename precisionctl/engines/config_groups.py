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
    """Weights whose codes are not what the group says that an engine takes for them.

    It takes the first that has a linear's name, or an expression that means it, among its targets, else the first with
    a class. If it `fuses`, the name of the fused linear counts before those of its parts, which count before a class
    unless that is `class_first`. If not, names count before expressions, and these in the alphabet's order; experts are
    no linears then."""

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
