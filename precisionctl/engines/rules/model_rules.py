"""What an engine asks of single models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from precisionctl.engines.rules.rule import Breaches, EngineRule, Finding, QuantizedDirectory
from precisionctl.engines.serving import ServingLayout
from precisionctl.errors import shown
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.fp8 import expert_dtype
from precisionctl.quant_methods.scales import Scales
from precisionctl.torch_when_used import torch


@dataclass(frozen=True)
class BlocksAlone:
    """A model whose linears of this name (`linear`) an engine multiplies as blocks of FP8 alone, under scales that it
    takes for powers of two, by a `rule`."""

    linear: str
    rule: EngineRule

    def concerns(self, name: str) -> bool:
        """Whether a weight is such a linear's."""
        return name.endswith(f".{self.linear}.weight")

    def other_scales(self, directory: QuantizedDirectory) -> Breaches:
        """Such linears under scales that are no powers of two."""
        for name in filter(self.concerns, directory.scales):
            scales = directory.read(directory.scales[name].weight).float()
            if bool((torch.frexp(scales).mantissa != 0.5).any()):
                yield name, "scales that are no powers of two"


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
class ExpertDtype:
    """A model whose experts an engine takes for MXFP4 (`fp4`) or for blocks of FP8 (`fp8`) as config.json `said`, by a
    `rule`."""

    said: Callable[[Mapping[str, Any]], object]
    rule: EngineRule

    def contradicted(self, directory: QuantizedDirectory) -> Breaches:
        """That config.json says another dtype than experts have."""
        codes = {name: directory.specs[name] for name in directory.scales}
        said, has = self.said(directory.config), expert_dtype(directory.config, codes).get("expert_dtype")
        if has and said != has:
            yield "config.json", f"experts are {has}, and taken for {shown(said)}"
