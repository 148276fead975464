"""What an engine asks of single models, whose linears it has kernels of their own for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precisionctl.engines.rule import EngineRule, Finding
from precisionctl.engines.serving import ServingLayout
from precisionctl.errors import shown
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import Scales
from precisionctl.quant_methods.fp8 import expert_dtype
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Unquantized:
    """Modules called so (`which`, by their names in memory) that an engine makes without quantization, but in `other`
    models, by the `model_type` of their text model."""

    which: re.Pattern[str]
    other: Sequence[str] = ()

    def concerns(self, module: str, model_type: object) -> bool | None:
        """Whether a module of a model is made so; None if it is not called so."""
        return model_type not in self.other if self.which.fullmatch(module) else None


FIRST_EXPERT = (".0.gate_proj", ".0.up_proj", ".0.down_proj")
"""How vLLM and SGLang look for a layer's experts in the list of compressed-tensors."""

_ROUTERS = r"gate|router|block_sparse_moe\.router\.layer"  # the last is Granite's, as in its files
ROUTERS = re.compile(rf".+\.({_ROUTERS})")
ROUTERS_AND_GATES = re.compile(rf".+\.({_ROUTERS}|shared_expert_gate)")
"""The latter are those of shared experts."""


@dataclass(frozen=True)
class BlocksAlone:
    """A model whose linears of this name (`linear`) an engine multiplies as blocks of FP8 alone, under scales that it
    takes for powers of two, by a `rule`."""

    linear: str
    rule: EngineRule

    def concerns(self, name: str) -> bool:
        """Whether a weight is such a linear's."""
        return name.endswith(f".{self.linear}.weight")

    def other_scales(self, scales: Mapping[str, Scales], read: Callable[[str], Tensor]) -> Iterator[Finding]:
        """Such linears under scales that are no powers of two."""
        for name in filter(self.concerns, scales):
            if bool((torch.frexp(read(scales[name].weight).float()).mantissa != 0.5).any()):
                yield Finding(name, "scales that are no powers of two", self.rule)


@dataclass(frozen=True)
class RowsMoved:
    """A model that stores queries, keys and values head by head in one linear (`linear`), and whose rows an engine puts
    in another order as it loads them, by a `rule`: those of the weight and of its tables of scales, or of `all` tensors
    beside it, also those of one number."""

    linear: str
    all: bool
    rule: EngineRule

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
        elif of_head % high:
            what = f"shape {list(spec.shape)}, whose heads of {of_head} rows are no whole blocks of {high}"
            return Finding(name, what, self.rule)
        alone = next((number for number in numbers if number), None) if self.all else None
        if alone is None:
            return None
        what = f"shape {list(spec.shape)}, whose `{alone.rpartition('.')[2]}` cannot be divided by heads"
        return Finding(name, what, self.rule)


@dataclass(frozen=True)
class ExpertsAsValues:
    """Models, by the `model_type` of their text model, whose experts an engine loads as values alone, by a `rule`: as
    codes they ask the config for a key, `asked`, that theirs does not have."""

    models: Sequence[str]
    asked: str
    rule: EngineRule


@dataclass(frozen=True)
class ExpertDtype:
    """A model whose experts an engine takes for MXFP4 (`fp4`) or for blocks of FP8 (`fp8`) as config.json `said`, by a
    `rule`."""

    said: Callable[[Mapping[str, Any]], object]
    rule: EngineRule

    def contradicted(self, config: Mapping[str, Any], codes: Mapping[str, TensorSpec]) -> Iterator[Finding]:
        """That config.json says another dtype than experts have."""
        said, has = self.said(config), expert_dtype(config, codes).get("expert_dtype")
        if has and said != has:
            yield Finding("config.json", f"experts are {has}, and taken for {shown(said)}", self.rule)
