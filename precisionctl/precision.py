"""Precision: the numerics of a target, frozen, and its presets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Literal

from precisionctl.errors import RecipeError
from precisionctl.fp8.state import DelayedScaling

Scaling = Literal["delayed", "current"]


@dataclass(frozen=True)
class Phase:
    """A part of a run: up to and with the step that is `until` of all, in FP8 or in BF16."""

    until: float = 1.0
    fp8: bool = True


@dataclass(frozen=True)
class Precision:
    """What a run computes its GEMMs in, or a checkpoint is made for.

    `scaling` and `delayed` mean nothing when `fp8` is False. `keep_bf16` lists Megatron module names
    (shell patterns) whose GEMMs stay in BF16. `schedule` lists the phases of a run that is not in FP8 all the time.
    Raises RecipeError where they do not follow one another to the run's end.
    """

    fp8: bool
    scaling: Scaling = "delayed"
    delayed: DelayedScaling = field(default_factory=DelayedScaling)
    keep_bf16: tuple[str, ...] = ()
    schedule: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        ends = [phase.until for phase in self.schedule]
        if ends and not (ends[-1] == 1 and all(before < end for before, end in pairwise([0.0, *ends]))):
            raise RecipeError(
                f"the phases of precision.schedule end at {', '.join(f'{end:g}' for end in ends)} of the run",
                do="`until` must rise from above 0, and be 1 in the last phase, where it may be left out.",
            )

    def in_fp8(self, module: str) -> bool:
        """Whether the GEMM of the module with this Megatron name is computed in FP8."""
        return self.fp8 and not any(fnmatchcase(module, pattern) for pattern in self.keep_bf16)


PRESETS: Mapping[str, Precision] = {
    "bf16": Precision(fp8=False),
    "fp8-delayed": Precision(fp8=True),
    "fp8-current": Precision(fp8=True, scaling="current"),
}
