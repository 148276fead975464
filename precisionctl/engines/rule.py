"""What an inference engine asks of a directory, and where one does not keep to it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import Scales, Spelling


@dataclass(frozen=True)
class EngineRule:
    """What an engine requires, and the `source` that says so. Where a `fatal` rule is broken, the engine does not load
    the directory or answers wrongly; where another is, it loses accuracy or speed."""

    text: str
    source: str
    fatal: bool = True


@dataclass(frozen=True)
class Finding:
    """A rule that a checkpoint breaks, and where."""

    where: str
    what: str
    rule: EngineRule

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.rule.text} [{self.rule.source}]"


@dataclass(frozen=True)
class QuantizedDirectory:
    """A directory of FP8 codes as rules see it: its `quantization_config`, the `method` and `scheme` that it names and
    how those are spelled, all of the stored tensors, the `scales` of those that are codes, `read`, which gives a
    scale's value, and `hf_quant_config`, what hf_quant_config.json says, where there is one."""

    quantization: Mapping[str, Any]
    method: str
    scheme: str
    spelling: Spelling
    specs: Mapping[str, TensorSpec]
    scales: Mapping[str, Scales]
    read: Callable[[str], Tensor]
    hf_quant_config: Mapping[str, Any] | None = None


Breaches = Iterator[tuple[str, str]]
"""Where a demand is not kept to (a tensor or a file), and what is wrong there."""


@dataclass(frozen=True)
class Demand:
    """A rule that some engines have, and what finds, in a directory, where it is broken and how."""

    broken: Callable[[QuantizedDirectory], Breaches]
    rule: EngineRule

    def findings(self, directory: QuantizedDirectory) -> Iterator[Finding]:
        for where, what in self.broken(directory):
            yield Finding(where, what, self.rule)
