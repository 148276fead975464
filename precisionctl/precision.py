"""Precision: the numerics of a target, frozen, and its presets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from precisionctl.fp8.state import DelayedScaling

Scaling = Literal["delayed", "current"]


@dataclass(frozen=True)
class Precision:
    """What a run computes its GEMMs in, or a checkpoint is made for.

    `scaling` and `delayed` mean nothing when `fp8` is False. `keep_bf16` lists Megatron module names
    (shell patterns) whose GEMMs stay in BF16.
    """

    fp8: bool
    scaling: Scaling = "delayed"
    delayed: DelayedScaling = field(default_factory=DelayedScaling)
    keep_bf16: tuple[str, ...] = ()

    def in_fp8(self, module: str) -> bool:
        """Whether the GEMM of the module with this Megatron name is computed in FP8."""
        return self.fp8 and not any(fnmatchcase(module, pattern) for pattern in self.keep_bf16)


PRESETS: Mapping[str, Precision] = {
    "bf16": Precision(fp8=False),
    "fp8-delayed": Precision(fp8=True),
    "fp8-current": Precision(fp8=True, scaling="current"),
}
