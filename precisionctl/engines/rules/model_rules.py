"""What an engine asks of single models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from precisionctl.engines.rules.rule import Breaches, EngineRule, QuantizedDirectory
from precisionctl.errors import shown
from precisionctl.quant_methods.fp8 import expert_dtype
from precisionctl.torch_when_used import torch


@dataclass(frozen=True)
class CodesAlone:
    """A model whose `linears` of these names an engine loads as codes alone, beside other codes, by a `rule`. In
    `blocks`: as blocks of FP8, under scales that it takes for powers of two."""

    linears: tuple[str, ...]
    rule: EngineRule
    blocks: bool = False

    def concerns(self, name: str) -> bool:
        """Whether a weight is such a linear's."""
        return name.endswith(tuple(f".{linear}.weight" for linear in self.linears))

    def other_scales(self, directory: QuantizedDirectory) -> Breaches:
        """Such linears under scales that are no powers of two."""
        for name in filter(self.concerns, directory.scales if self.blocks else ()):
            scales = directory.read(directory.scales[name].weight).float()
            if bool((torch.frexp(scales).mantissa != 0.5).any()):
                yield name, "scales that are no powers of two"


@dataclass(frozen=True)
class InEveryLayer:
    """A model of which an engine asks for a tensor (`name`, behind the layer's) in every layer, by a `rule`. Beside
    codes it does not insist."""

    name: str
    rule: EngineRule

    def lacking(self, names: Collection[str]) -> Iterator[str]:
        """The tensors of layers that none of these names is, of layers that have a norm of inputs."""
        norm = ".input_layernorm.weight"
        wanted = (f"{name.removesuffix(norm)}.{self.name}" for name in names if name.endswith(norm))
        return (name for name in wanted if name not in names)


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
