"""The rules of inference engines, and the findings where a directory breaks one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import Scales, Spelling

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

    model_type, quantization: that of config.json, and its `quantization_config`. method, scheme: the quant method and
    scheme that it names. spelling: the names and shapes of that method's scales; None if no export is written in it.
    specs: all stored tensors, by name. scales: the names of the scales of each weight that is codes. kinds: what the
    codes of each are, a scheme of FP8 or the name of packed ones. read: returns a scale's value by its name.
    hf_quant_config: the content of hf_quant_config.json, if there is one.
    """

    model_type: str
    quantization: Mapping[str, Any]
    method: str
    scheme: str
    spelling: Spelling | None
    specs: Mapping[str, TensorSpec]
    scales: Mapping[str, Scales]
    kinds: Mapping[str, str]
    read: Callable[[str], Tensor]
    hf_quant_config: Mapping[str, Any] | None = None


Breaches = Iterator[tuple[str, str]]
"""Where a demand is not met (a tensor or a file), and what is wrong there."""

Demand = Callable[[QuantizedDirectory], Breaches]
"""Finds where a directory breaks a rule, and how."""


def broken(demand: Demand, rule: EngineRule, directory: QuantizedDirectory) -> Iterator[Finding]:
    """The findings where a directory breaks a rule."""
    return (Finding(where, what, rule) for where, what in demand(directory))
