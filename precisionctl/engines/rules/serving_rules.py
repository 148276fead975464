"""What an engine asks of a model on each of its GPUs: the shapes of codes that it takes, and what GPUs divide."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from precisionctl.engines.rules.rule import EngineRule, Finding, QuantizedDirectory
from precisionctl.engines.serving import EXPERT, Ragged, ServingLayout, experts_module
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import CHANNEL, TENSOR, Block
from precisionctl.quant_methods.scales import Scales

_CONV1D = re.compile(r"transformer\.h\.\d+\.(attn|mlp)\.(c_attn|c_proj|c_fc)\.weight")
"""GPT-2's linears, stored as `[in, out]`."""

_OF_CONV1D = ("gpt2", "openai-gpt")
"""Whose classes have them. Linears of GPT-BigCode and GPT-Neo have the same names, and are `[out, in]`."""

_UNKNOWN_CUT = EngineRule(
    "how GPUs divide it is not known, so whether they can was not checked", "precisionctl verify", fatal=False
)

_HEADS_EVENLY = EngineRule(
    "every GPU gets the same number of heads; fewer key-value heads than GPUs are each on the same number of GPUs",
    "vLLM 0.33 config/model.py, layers/linear.py QKVParallelLinear, mamba_mixer2.py; SGLang's have the same rules",
)


@dataclass(frozen=True)
class RowsMoved:
    """A model that stores queries, keys and values in one linear (`linear`), and whose rows an engine puts in another
    order, or deals out to several linears, as it loads them, by a `rule`: those of the weight and of its tables of
    scales, or of `all` tensors beside it, also those of one number. `blocks` says whether it moves scales of blocks of
    rows too."""

    linear: str
    all: bool
    rule: EngineRule
    blocks: bool = True

    def check(self, name: str, spec: TensorSpec, scales: Scales, served: ServingLayout) -> Finding | None:
        """That the rows of a weight with these scales cannot be moved, as a finding; None where they can, or where it
        is another linear's."""
        if not name.endswith(f".{self.linear}.weight") or not served.heads:
            return None
        heads, groups, _ = served.heads[0]
        of_head, high = spec.rows // (heads + 2 * groups), scales.block[0]
        numbers = [scales.global_scale, scales.shape, scales.input, scales.input_zero_point]
        if high == spec.rows:
            numbers = [scales.weight, *numbers]
        elif high > 1 and not self.blocks:
            return Finding(name, f"shape {list(spec.shape)}, with a scale for {high} rows", self.rule)
        elif of_head % high:
            what = f"shape {list(spec.shape)}, whose heads of {of_head} rows are no whole blocks of {high}"
            return Finding(name, what, self.rule)
        alone = next((number for number in numbers if number), None) if self.all else None
        if alone is None:
            return None
        what = f"shape {list(spec.shape)}, whose `{alone.rpartition('.')[2]}` cannot be divided by heads"
        return Finding(name, what, self.rule)


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
        """The findings on a directory's codes. Where GPUs do not divide the heads, their shapes are not judged."""
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


@dataclass(frozen=True)
class Division:
    """How an engine divides a model among GPUs.

    experts: what it asks of experts that are dealt out whole; None: nothing. evenly: whether each GPU must get as many.
    whole_groups: the rule that GPUs share no group of a mixer beside codes; None: they may.
    """

    experts: EngineRule | None = None
    evenly: bool = False
    whole_groups: EngineRule | None = None

    def check(self, names: Iterable[str], served: ServingLayout) -> list[Finding]:
        """Why the engine does not divide a model with these tensors, of which some are codes, as a finding."""
        return self.check_spread(names, served) or self.check_groups(served)

    def check_spread(self, names: Iterable[str], served: ServingLayout) -> list[Finding]:
        """Why the engine does not divide a model with these tensors, as a finding: GPUs do not divide its heads; or its
        experts are to be dealt out whole, and there are none, or the GPUs do not divide their number."""
        if served.uneven:
            return [Finding("config.json", served.uneven, _HEADS_EVENLY)]
        rule = self.experts
        if rule is None or not served.expert_parallel:
            return []
        names = list(names)
        counts = Counter((match[1], match[2]) for match in map(EXPERT.fullmatch, names) if match)
        if not counts and not any(experts_module(name.partition("[")[0]) for name in names):
            return [Finding("config.json", "a model without experts", rule)]
        uneven = ((module, count) for (module, _), count in counts.items() if self.evenly and count % served.ranks)
        what = "{} experts on {} GPUs"
        return [Finding(module, what.format(count, served.ranks), rule) for module, count in islice(uneven, 1)]

    def check_groups(self, served: ServingLayout) -> list[Finding]:
        """That GPUs would share a mixer's only group, where the engine does not let them beside codes, as a finding."""
        if self.whole_groups is None or not served.shares_rows:
            return []
        return [Finding("config.json", f"mixers of one group on {served.ranks} GPUs", self.whole_groups)]
