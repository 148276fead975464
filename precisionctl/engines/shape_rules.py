"""Which shapes of weights an engine takes as codes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from precisionctl.engines.model_rules import RowsMoved
from precisionctl.engines.rule import EngineRule, Finding, QuantizedDirectory
from precisionctl.engines.serving import Ragged, ServingLayout
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import CHANNEL, TENSOR, Block, Scales

_CONV1D = re.compile(r"transformer\.h\.\d+\.(attn|mlp)\.(c_attn|c_proj|c_fc)\.weight")
"""GPT-2's linears, stored as `[in, out]`."""

_OF_CONV1D = ("gpt2", "openai-gpt")
"""Whose classes have them. Linears of GPT-BigCode and GPT-Neo have the same names, and are `[out, in]`."""

_UNKNOWN_CUT = EngineRule(
    "how GPUs divide it is not known, so whether they can was not checked", "precisionctl verify", fatal=False
)


@dataclass(frozen=True)
class ShapeRules:
    """Which shapes of weights an engine takes as codes, on each of its GPUs.

    aligned, blocks: the rules on weights with one scale or a scale for each channel, and on those with a scale for each
    block. ragged: which linears may have a last block of scales that is cut off. decoded: the quant methods whose codes
    become values before it multiplies, so that it takes any shape, with the rule on FP8 that it is told to multiply as
    codes. conv1d: the rule by which it does not load codes for GPT-2's linears; None if it does. moved: the models, by
    `model_type`, of which it moves rows as it loads them.
    """

    aligned: EngineRule
    blocks: EngineRule
    ragged: Ragged
    decoded: Mapping[str, EngineRule] = field(default_factory=dict)
    conv1d: EngineRule | None = None
    moved: Mapping[object, RowsMoved] = field(default_factory=dict)

    def refusal(self, name: str, spec: TensorSpec, block: Block, served: ServingLayout, method: str) -> str | None:
        """Why the engine refuses a weight of this shape as codes of a method with a scale for each block, in words;
        None if it takes it."""
        if self._conv1d(name, served):
            return "codes of a class that is no linear are taken for weights"
        if method in self.decoded and block[0] not in (None, 1):
            return None  # it pads a weight that ends within a block
        return served.refusal(name, spec, block, self.ragged, aligned=method not in self.decoded)

    def check_shape(
        self, name: str, spec: TensorSpec, block: Block, served: ServingLayout, method: str
    ) -> Finding | None:
        """The rule that such a weight breaks, whether the engine refuses it or takes it at a cost; None where it breaks
        none."""
        whole = block in (TENSOR, CHANNEL)
        what, rule = self.refusal(name, spec, block, served, method), self.aligned if whole else self.blocks
        if what is None and method in self.decoded and whole and spec.packing is None:
            what, rule = served.refusal(name, spec, block, self.ragged), self.decoded[method]
        return Finding(name, what, self._conv1d(name, served) or rule) if what else None

    def check_moved(self, name: str, spec: TensorSpec, scales: Scales, served: ServingLayout) -> Finding | None:
        """That the engine cannot move the rows of a weight together with their scales as it loads it, as a finding;
        None where it can, or does not move them."""
        moved = self.moved.get(served.model_type)
        return moved.check(name, spec, scales, served) if moved else None

    def check(self, directory: QuantizedDirectory) -> Iterator[Finding]:
        """The findings on the shapes of a directory's codes; where GPUs do not divide the heads, on none of them."""
        served, specs = directory.served, directory.specs
        for name, weight in directory.coded.items() if not served.uneven else ():
            if found := self.check_shape(name, specs[name], weight.form.block, served, directory.method):
                yield found
        for name, scales in directory.scales.items():
            if found := self.check_moved(name, specs[name], scales, served):
                yield found
        for name in served.unknown(directory.scales):
            yield Finding(name, f"on {served.ranks} GPUs", _UNKNOWN_CUT)

    def _conv1d(self, name: str, served: ServingLayout) -> EngineRule | None:
        """The rule by which codes of this weight are not loaded, as it is one of GPT-2's linears."""
        return self.conv1d if served.model_type in _OF_CONV1D and _CONV1D.fullmatch(name) else None
