"""Precision: the numerics of a run or a target, and presets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Literal

from precisionctl.codes.numerics import MX_BLOCK
from precisionctl.codes.statistics import Scaling
from precisionctl.errors import RecipeError, shown
from precisionctl.fp8.state import DelayedScaling, Fp8Format, Role, code_dtype
from precisionctl.param import GEMM_ALIGNMENT, gemm_misfit
from precisionctl.torch_when_used import torch

PrecisionOption = Literal["bf16", "fp8", "nvfp4"]
"""What `resume --precision` says of a run."""


@dataclass(frozen=True)
class Phase:
    """A part of a run in FP8 or in BF16, up to the share `until` (above 0, up to 1) of all steps."""

    until: float = 1.0
    fp8: bool = True


@dataclass(frozen=True)
class BlockScaling:
    """The settings of TE's Float8BlockScaling and MXFP8BlockScaling. With `use_f32_scales` (in TE also
    NVTE_FP8_BLOCK_SCALING_FP32_SCALES) the scales of 128-blocks are not rounded to powers of two; MXFP8's always
    are."""

    fp8_format: Fp8Format = "E4M3"
    use_f32_scales: bool = False


@dataclass(frozen=True)
class Precision:
    """The precision of a run's GEMMs, or of the runs that a checkpoint is made for.

    `fp8` is False for BF16; all else only matters if it is True. What is said of FP8 holds of the scaling `nvfp4` too.
    `delayed` has the settings of delayed scaling and the format of current scaling, `block` those of `block` and
    `mxfp8`; `nvfp4` has none. GEMMs of modules that match `keep_bf16` (shell patterns of Megatron module names) stay in
    BF16, and so do those of the given numbers of layers at the decoder's start and end. `schedule` lists
    the phases of a run that switches between FP8 and BF16. Raises RecipeError for a negative number of layers, and for
    phases that do not lead to the run's end.
    """

    fp8: bool = False
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
                raise RecipeError(f"precision.{key} = {shown(getattr(self, key))} must be 0 or above")
        ends = [phase.until for phase in self.schedule]
        if ends and not (ends[-1] == 1 and all(before < end for before, end in pairwise([0.0, *ends]))):
            raise RecipeError(
                f"the phases of precision.schedule end at {', '.join(f'{end:g}' for end in ends)} of the run",
                do="`until` is a share of train.steps and not a step: 0.5 is half of the run. It must rise from above "
                "0, and be 1 in the last phase, where it may be left out.",
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
    def f32_block_scales(self) -> bool:
        """Whether it computes with scales of 128-blocks that are not powers of two: the setting alone says nothing of
        runs in BF16 or under another scaling, which have it too."""
        return self.fp8 and self.scaling == "block" and self.block.use_f32_scales

    @property
    def codes(self) -> str:
        """What its GEMMs take, if they are not in BF16: `FP8` or `NVFP4`."""
        return "NVFP4" if self.scaling == "nvfp4" else "FP8"

    @property
    def option(self) -> PrecisionOption:
        """What `resume --precision` says for it."""
        if not self.fp8:
            return "bf16"
        return "nvfp4" if self.codes == "NVFP4" else "fp8"

    @property
    def alignment(self) -> int:
        """The number that both dimensions of the operands of a GEMM with codes must be multiples of: MXFP8's block, for
        NVFP4 the 16 bytes of cuBLASLt's leading dimensions."""
        return MX_BLOCK if self.scaling in ("mxfp8", "nvfp4") else GEMM_ALIGNMENT

    def misfit(self, shape: Sequence[int]) -> str | None:
        """Why no GEMM with codes takes an operand of this shape, in words; None if it does."""
        return gemm_misfit(shape, "MXFP8" if self.scaling == "mxfp8" else self.codes, self.alignment)

    @property
    def fp8_format(self) -> Fp8Format:
        """The format of an FP8 `scaling`."""
        assert self.codes == "FP8", "NVFP4 has E2M1 alone"
        return (self.block if self.scaling in ("block", "mxfp8") else self.delayed).fp8_format

    def dtype(self, role: Role) -> torch.dtype:
        """The dtype of a role's FP8 codes."""
        return code_dtype(self.fp8_format, role)

    def in_fp8(self, module: str) -> bool:
        """Whether the GEMM of a module, by Megatron name, is computed in FP8. If the last layers stay in BF16, call it
        on the result of `of_layers`, which knows the number of layers."""
        assert not self.num_layers_at_end_in_bf16, "call of_layers first: the number of layers is not known"
        if not self.fp8 or any(fnmatchcase(module, pattern) for pattern in self.keep_bf16):
            return False
        layer = re.match(r"decoder\.layers\.(\d+)\.", module)
        return layer is None or int(layer[1]) >= self.num_layers_at_start_in_bf16

    def of_layers(self, number: int) -> Precision:
        """The same precision for a model with this number of layers: the last ones that stay in BF16 are added to
        `keep_bf16` by name. Raises RecipeError if no layer is left for FP8."""
        at_start, at_end = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
        if at_start + at_end >= number:
            at_first, at_last = shown(at_start), shown(at_end)
            raise RecipeError(
                f"the first {at_first} and the last {at_last} layers in BF16 leave none of {number} for FP8",
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
    "nvfp4": Precision(fp8=True, scaling="nvfp4"),
}

EVERY_GEMM = PRESETS["fp8-delayed"]
"""A precision that keeps no module in BF16, where that alone matters of it."""
