"""The tensors that hold the scales of a quantized weight: which they are, what they are called, what amax they mean."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precisionctl.codes.elements import E4M3
from precisionctl.codes.group_scales import NVFP4_LARGEST
from precisionctl.param import is_slice

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scales:
    """The names of the tensors that hold the scale_inv of a quantized weight and of its input (`input` is None if that
    is dynamic), and how many rows and columns of the weight share a scale (`block`). The other tensors are as in its
    CodeFormat. `input_largest` is the number that the amax of an input becomes under a scale that is not global."""

    weight: str
    input: str | None
    block: tuple[int, int]
    global_scale: str | None = None
    divides: bool = False
    zero_points: str | None = None
    shape: str | None = None
    input_zero_point: str | None = None
    input_largest: float = E4M3.of_amax

    @property
    def of_weight(self) -> tuple[str, ...]:
        """All names except the input's."""
        names = (self.weight, self.global_scale, self.zero_points, self.shape)
        return tuple(name for name in names if name is not None)

    @property
    def global_divides(self) -> bool | None:
        """As `Encoding.global_divides`."""
        return self.divides if self.global_scale else None

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        names = (*self.of_weight, self.input, self.input_zero_point)
        return tuple(name for name in names if name is not None)

    @property
    def inputs_in_fp8(self) -> bool:
        """Whether a fixed scale of the input is the scale_inv of codes of FP8."""
        return self.global_scale is None and self.input_largest == E4M3.of_amax

    def input_amax(self, stored: Tensor, zero_point: float = 0.0) -> Tensor:
        """The amax, FP32, that a fixed scale of the input stands for: `scale_inv * 448`, for INT8 `* 127.5`; with a
        zero point, the end of the range that is farther from zero; `* 448 * 6` for a global scale, under which the
        largest block's scale is 448."""
        if self.global_scale is None:
            beyond = abs(zero_point + 0.5) if self.input_zero_point else 0.0
            return amax_of(stored, self.input_largest + beyond)
        return NVFP4_LARGEST / stored if self.divides else stored * NVFP4_LARGEST

    def of_input_amax(self, amax: Tensor) -> Tensor:
        """The inverse of `input_amax`, for a zero point of 0 where there is one."""
        if self.global_scale is None:
            return scale_of(amax, self.input_largest + (0.5 if self.input_zero_point else 0.0))
        return NVFP4_LARGEST / amax if self.divides else amax / NVFP4_LARGEST


def scale_of(amax: Tensor, largest: float = E4M3.of_amax) -> Tensor:
    """The fixed scale_inv of codes for an amax that is to become the number `largest`, of the same shape, FP32."""
    return amax / largest


def amax_of(scale_inv: Tensor, largest: float = E4M3.of_amax) -> Tensor:
    """The inverse of `scale_of`, in FP32 as well."""
    return scale_inv * largest


_SLICE = re.compile(r"(.+)(\[\d+\])")


def sibling(weight: str, kind: str) -> str:
    """The name of a scale beside a weight: `<module>.weight_scale` of `<module>.weight`, and of experts that are
    stored as one tensor `experts.gate_up_proj_scale[3]` of `experts.gate_up_proj[3]`, and of its `_blocks[3]`."""
    if is_slice(weight) and (match := _SLICE.fullmatch(weight)):
        return f"{match[1].removesuffix('_blocks')}_{kind.removeprefix('weight_')}{match[2]}"
    return f"{weight.removesuffix('.weight')}.{kind}"
