"""Precision: the numerics of a target, frozen, and its presets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise

import torch

from precisionctl.errors import RecipeError
from precisionctl.fp8.numerics import MX_BLOCK
from precisionctl.fp8.state import DelayedScaling, Fp8Format, Role, code_dtype
from precisionctl.fp8.statistics import Scaling
from precisionctl.param import GEMM_ALIGNMENT


@dataclass(frozen=True)
class Phase:
    """A part of a run, in FP8 or in BF16. It ends with the step at the share `until` (above 0, up to 1) of all
    steps."""

    until: float = 1.0
    fp8: bool = True


@dataclass(frozen=True)
class BlockScaling:
    """What TE's Float8BlockScaling and MXFP8BlockScaling leave open, field for field. With `use_f32_scales` the scales
    of 128-blocks are no powers of two (where it is not given, TE asks NVTE_FP8_BLOCK_SCALING_FP32_SCALES); those of
    MXFP8 always are."""

    fp8_format: Fp8Format = "E4M3"
    use_f32_scales: bool = False


@dataclass(frozen=True)
class Precision:
    """What a run computes its GEMMs in, or a checkpoint is made for.

    `scaling` and what follows mean nothing when `fp8` is False. `delayed` has the settings of delayed scaling, and the
    format of current scaling; `block` has those of `block` and `mxfp8`. `keep_bf16` lists Megatron module names (shell
    patterns) whose GEMMs stay in BF16, as those of so many layers at the decoder's start and end do. `schedule` lists
    the phases of a run that is not in FP8 all the time. Raises RecipeError for a negative number of layers, and for
    phases that do not follow one another to the run's end.
    """

    fp8: bool
    scaling: Scaling = "delayed"
    delayed: DelayedScaling = field(default_factory=DelayedScaling)
    block: BlockScaling = field(default_factory=BlockScaling)
    keep_bf16: tuple[str, ...] = ()
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0
    schedule: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        for key in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if getattr(self, key) < 0:
                raise RecipeError(f"precision.{key} = {getattr(self, key)} must be 0 or above")
        ends = [phase.until for phase in self.schedule]
        if ends and not (ends[-1] == 1 and all(before < end for before, end in pairwise([0.0, *ends]))):
            raise RecipeError(
                f"the phases of precision.schedule end at {', '.join(f'{end:g}' for end in ends)} of the run",
                do="`until` must rise from above 0, and be 1 in the last phase, where it may be left out.",
            )

    @property
    def counts_layers(self) -> bool:
        """Whether it keeps layers in BF16 by their number."""
        return bool(self.num_layers_at_start_in_bf16 or self.num_layers_at_end_in_bf16)

    @property
    def keeps_state(self) -> bool:
        """Whether its GEMMs keep FP8 state between steps."""
        return self.fp8 and self.scaling == "delayed"

    @property
    def alignment(self) -> int:
        """What both dimensions of an FP8 GEMM's operands must be multiples of."""
        return MX_BLOCK if self.scaling == "mxfp8" else GEMM_ALIGNMENT

    @property
    def fp8_format(self) -> Fp8Format:
        """The format of `scaling`."""
        return (self.block if self.scaling in ("block", "mxfp8") else self.delayed).fp8_format

    def dtype(self, role: Role) -> torch.dtype:
        """The dtype of a role's codes."""
        return code_dtype(self.fp8_format, role)

    def in_fp8(self, module: str) -> bool:
        """Whether the GEMM of the module with this Megatron name is computed in FP8. Where a recipe keeps the last
        layers in BF16, that needs their number: ask the result of `of_layers`."""
        assert not self.num_layers_at_end_in_bf16, "nobody has said which layers are the last"
        if not self.fp8 or any(fnmatchcase(module, pattern) for pattern in self.keep_bf16):
            return False
        layer = re.match(r"decoder\.layers\.(\d+)\.", module)
        return layer is None or int(layer[1]) >= self.num_layers_at_start_in_bf16

    def of_layers(self, number: int) -> "Precision":
        """The same precision for a model of so many layers: the last ones that stay in BF16 are named in `keep_bf16`.
        Raises RecipeError where no layer is left for FP8."""
        at_start, at_end = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
        if at_start + at_end >= number:
            raise RecipeError(
                f"the first {at_start} and the last {at_end} layers in BF16 leave none of {number} for FP8",
                do="Give smaller num_layers_at_start_in_bf16 and num_layers_at_end_in_bf16, or train in BF16.",
            )
        last = tuple(f"decoder.layers.{layer}.*" for layer in range(number - at_end, number))
        return replace(self, keep_bf16=(*self.keep_bf16, *last), num_layers_at_end_in_bf16=0)


PRESETS: Mapping[str, Precision] = {
    "bf16": Precision(fp8=False),
    "fp8-delayed": Precision(fp8=True),
    "fp8-current": Precision(fp8=True, scaling="current"),
    "fp8-block": Precision(fp8=True, scaling="block"),
    "mxfp8": Precision(fp8=True, scaling="mxfp8"),
}
