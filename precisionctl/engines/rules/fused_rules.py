"""What an engine asks of linears that it computes as one, and of a layer's experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precisionctl.engines.rules.rule import EngineRule, Finding, QuantizedDirectory
from precisionctl.engines.serving import EXPERT, FUSED
from precisionctl.quant_methods.base import TENSOR


@dataclass(frozen=True)
class FusedLinears:
    """Linears of one input that an engine computes as one.

    groups: their names; none if it fuses nothing, then scales are compared of those that other engines fuse.
    all_or_none: the rule that all of a group, or of a layer's experts, are codes of one format. scales: what it does
    with scales of weights and inputs that differ in a group, global_scales: with global ones (NVFP4), input_scales:
    with those of the inputs of a layer's experts.
    """

    groups: Sequence[tuple[str, ...]]
    all_or_none: EngineRule
    scales: EngineRule
    global_scales: EngineRule
    input_scales: EngineRule

    def check(self, directory: QuantizedDirectory) -> Iterator[Finding]:
        """The findings where codes are only a part of what is fused, or have scales that differ."""
        scales, specs, kinds = directory.scales, directory.specs, directory.kinds
        for group in (*fused_weights(specs, self.groups), *_experts(specs)):
            quantized = [name for name in group if name in scales]
            if quantized and len(quantized) < len(group):
                what = f"{specs[quantized[0]].codes_name} codes, but not all that it is fused with"
                yield Finding(quantized[0], what, self.all_or_none)
            formats = {
                (kinds[name], specs[name].packing, specs[name].dtype, scales[name].input is None) for name in quantized
            }
            if len(formats) > 1:
                what = "codes in another format than those that it is fused with"
                yield Finding(quantized[0], what, self.all_or_none)

        # scales of whole weights, global ones, and fixed ones of inputs; integers have rules of their own
        floating = {name: each for name, each in scales.items() if not specs[name].element.is_integer}
        for group in fused_weights(floating, self.groups or FUSED):
            found = [floating[name] for name in group]
            of_all = [name for name in group if directory.coded[name].form.block == TENSOR]
            for kind, names, rule in (
                ("weight", [floating[name].weight for name in of_all], self.scales),
                ("global weight", [each.global_scale for each in found if each.global_scale], self.global_scales),
                ("input", [each.input for each in found if each.input], self.scales),
            ):
                values = [float(value) for name in names if (value := directory.read(name)).numel() == 1]
                if len(set(values)) > 1:
                    yield Finding(group[0], f"{kind} scales {values} of one fused group differ", rule)

        for experts in _experts(scales):
            fixed = (scale for name in experts if (scale := scales[name].input) is not None)
            inputs = {float(directory.read(scale)) for scale in fixed}
            if len(inputs) > 1:
                what = f"input scales of experts differ, {min(inputs)} to {max(inputs)}"
                yield Finding(experts[0], what, self.input_scales)


def fused_weights(specs: Mapping[str, Any], groups: Iterable[tuple[str, ...]]) -> Iterator[list[str]]:
    """The weights of each group of linears that engines fuse."""
    for group in groups:
        first = f".{group[0]}.weight"
        for name in specs:
            if name.endswith(first):
                stem = name.removesuffix(first)
                yield [found for part in group if (found := f"{stem}.{part}.weight") in specs]


def _experts(names: Iterable[str]) -> Iterable[list[str]]:
    """The weights of each layer's experts, by their part: an engine gives them one scheme, and one input scale."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in names:
        if match := EXPERT.fullmatch(name):
            found.setdefault((match[1], match[2]), []).append(name)
    return found.values()
