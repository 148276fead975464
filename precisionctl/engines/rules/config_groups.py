"""Which of several config groups of compressed-tensors an engine decodes a linear by."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

from precisionctl.engines.rules.ignore_lists import BY_END_OR_REGEX, BY_NAME_OR_REGEX, words
from precisionctl.engines.rules.ignored_modules import Unquantized, linears
from precisionctl.engines.rules.rule import Breaches, Demand, QuantizedDirectory
from precisionctl.engines.serving import EXPERT
from precisionctl.quant_methods.base import codes_kind
from precisionctl.quant_methods.compressed_tensors import ConfigGroup, config_groups, read_group
from precisionctl.quant_methods.scales import sibling

_CLASS = "Linear"
"""The target that means all linears."""

_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What engines fuse into a linear of this name, but of experts."""
_FUSED = {part: fused for fused, parts in _PARTS.items() for part in parts}


class Targets:
    """The targets of config groups, in their order, of which an engine takes one for a linear.

    An engine that `fuses` takes the first that means the linear that a linear is fused into; else, if each part of that
    has a target, the first part's; else a class, which counts before the parts if it is `class_first`. A linear that is
    not fused has the first target that means it, else a class. One that does not fuse takes a linear's whole name, else
    the first of the expressions that mean it in the order of the alphabet, else a class.

    vLLM 0.33 and SGLang 0.5.23 compressed_tensors/utils.py find_matched_target; compressed-tensors 0.20 utils/match.py
    match_targets."""

    def __init__(
        self, targets: Iterable[str], modules: Container[str], *, fuses: bool, class_first: bool = False
    ) -> None:
        """`modules` are the linears that there are."""
        listed = list(targets)
        self._class = _CLASS if _CLASS in listed else None
        if not fuses:
            listed.sort(key=lambda target: (target.startswith("re:"), target))
        self._named = BY_NAME_OR_REGEX.first(listed)
        self._modules, self._fuses, self._class_first = modules, fuses, class_first

    def of(self, module: str) -> str | None:
        """The target for a linear; None if there is none. Raises as `Matching.first`."""
        above, _, linear = module.rpartition(".")
        fused = _FUSED.get(linear) if self._fuses and not EXPERT.fullmatch(f"{module}.weight") else None
        parts = [each for part in _PARTS.get(fused or "", ()) if (each := f"{above}.{part}") in self._modules]
        if fused is None or len(parts) < 2:
            return self._named(module) or self._class
        if target := self._named(f"{above}.{fused}") or (self._class_first and self._class):
            return target
        of_parts = [self._named(part) for part in parts]
        return of_parts[0] if all(of_parts) else self._class


def in_another_group(*, fuses: bool, class_first: bool = False) -> Demand:
    """Weights whose codes are not what the group says that an engine takes for them, of several; `fuses` and
    `class_first` as in `Targets`."""

    def broken(directory: QuantizedDirectory) -> Breaches:
        groups = _groups(directory)
        kinds: dict[str, list[str]] = {}
        for name, said in groups.items():
            read = read_group(said)
            kinds[name] = list(dict.fromkeys(codes_kind(form, read.static) for form in read.formats))
        for weight, group in _chosen(directory, fuses, class_first) if len(groups) > 1 else ():
            if (codes := directory.kinds[weight]) not in kinds[group]:
                yield weight, f"codes of {codes}, decoded as those of config group {group}: {' or '.join(kinds[group])}"

    return broken


TAKES_WHAT_MEMORY_HOLDS = (
    "where the config says that inputs have a fixed scale, it takes what memory holds for one that is missing"
)
"""What engines do `without_scale_of_inputs`."""


def without_scale_of_inputs(*, fuses: bool, class_first: bool = False) -> Demand:
    """Weights without the fixed scale of inputs that there is by their group; `fuses` and `class_first` as in
    `Targets`."""

    def broken(directory: QuantizedDirectory) -> Breaches:
        groups = _groups(directory)
        for weight, group in _chosen(directory, fuses, class_first):
            stored = (sibling(weight, kind) in directory.specs for kind in ("input_scale", "input_global_scale"))
            if groups[group].fixes_inputs and not any(stored):
                yield weight, f"no scale of inputs, which are fixed in config group {group}"

    return broken


def _chosen(directory: QuantizedDirectory, fuses: bool, class_first: bool) -> Iterator[tuple[str, str]]:
    """The weights that are codes, with the group that an engine takes for each: without those that have no target,
    which are as ignored, and, of an engine that does not fuse, experts, whose rule is `wrongly_joined`."""
    of_target = {target: name for name, group in _groups(directory).items() for target in group.targets}
    targets = Targets(of_target, _modules(directory), fuses=fuses, class_first=class_first)
    for weight in directory.scales:
        target = None if EXPERT.fullmatch(weight) and not fuses else targets.of(weight.removesuffix(".weight"))
        if target:
            yield weight, of_target[target]


def _groups(directory: QuantizedDirectory) -> Mapping[str, ConfigGroup]:
    return config_groups(directory.quantization) if directory.method == "compressed-tensors" else {}


def without_target(unquantized: Unquantized) -> Demand:
    """Values that no config group means and that are not ignored, but heads and what is `unquantized` anyway; linears
    are taken for fused, and a class counts before their parts."""

    def broken(directory: QuantizedDirectory) -> Breaches:
        named = [target for group in _groups(directory).values() for target in group.targets]
        targets = Targets(named, _modules(directory), fuses=True, class_first=True)
        ignored = BY_END_OR_REGEX.of(words(directory.quantization.get("ignore")))
        for weight in linears(directory.specs) if named else ():
            module = weight.removesuffix(".weight")
            if module.endswith("lm_head") or unquantized.which.fullmatch(module) or ignored(module):
                continue
            if targets.of(module) is None:
                yield weight, "no target means its module, and it is not ignored"

    return broken


def _modules(directory: QuantizedDirectory) -> set[str]:
    return {name.removesuffix(".weight") for name in directory.specs}
