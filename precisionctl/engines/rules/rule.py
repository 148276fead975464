"""The rules of inference engines, and the findings where a directory breaks one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from precisionctl.engines.serving import ServingLayout, served_config
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import Spelling
from precisionctl.quant_methods.coded_weights import CodedWeight
from precisionctl.quant_methods.scales import Scales

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class EngineRule:
    """A requirement of an engine: its `text`, and the `source` (a file of the engine) that states it. If a `fatal` rule
    is broken, the engine does not load the directory or computes wrong results; otherwise it loses accuracy or
    speed."""

    text: str
    source: str
    fatal: bool = True


@dataclass(frozen=True)
class Finding:
    """A rule that a checkpoint breaks: `where` (a tensor or a file), and `what` is wrong there."""

    where: str
    what: str
    rule: EngineRule

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.rule.text} [{self.rule.source}]"


@dataclass(frozen=True)
class QuantizedDirectory:
    """A directory of codes, as the rules see it.

    config: all of config.json. method, scheme: the quant method and scheme that it names. spelling: the names and
    shapes of that method's scales; None if no export is written in it. specs: all tensors, by name; codes as the weight
    that they are. coded: the weights that are codes. kinds: what the codes of each are, a scheme of FP8 or the name of
    packed ones. read: returns a scale's value by its name. served: on how many GPUs, and how they divide the model.
    hf_quant_config: the content of hf_quant_config.json, if there is one.
    """

    config: Mapping[str, Any]
    method: str
    scheme: str
    spelling: Spelling | None
    specs: Mapping[str, TensorSpec]
    coded: Mapping[str, CodedWeight]
    kinds: Mapping[str, str]
    read: Callable[[str], Tensor]
    served: ServingLayout
    hf_quant_config: Mapping[str, Any] | None = None

    @property
    def quantization(self) -> Mapping[str, Any]:
        """The `quantization_config`."""
        found: Mapping[str, Any] = self.config["quantization_config"]
        return found

    @property
    def model_type(self) -> str:
        """That of config.json."""
        return str(self.config.get("model_type"))

    @property
    def text_type(self) -> object:
        """The `model_type` of the text model."""
        return served_config(self.config).get("model_type")

    @cached_property
    def scales(self) -> Mapping[str, Scales]:
        """The names of the scales of each weight that is codes."""
        return {name: weight.scales for name, weight in self.coded.items()}


Breaches = Iterator[tuple[str, str]]
"""Where a demand is not met (a tensor or a file), and what is wrong there."""

Demand = Callable[[QuantizedDirectory], Breaches]
"""Finds where a directory breaks a rule, and how."""


def broken(demand: Demand, rule: EngineRule, directory: QuantizedDirectory) -> Iterator[Finding]:
    """The findings where a directory breaks a rule."""
    return (Finding(where, what, rule) for where, what in demand(directory))
