"""Tensors stored in 8 or 16 bits with one scale each, as Transformer Engine's FusedAdam stores its state."""

from dataclasses import dataclass

import torch
from torch import Tensor

from precisionctl.codes.numerics import amax, code_values, encode, largest_code

_LARGEST = {torch.float8_e4m3fn: largest_code(torch.float8_e4m3fn), torch.float16: torch.finfo(torch.float16).max / 2}
"""By dtype, the code that a tensor's amax is scaled to (fused_adam.py, dtype_to_range_map)."""


@dataclass(eq=False)
class ScaledTensor:
    """A tensor as `codes` of any shape (E4M3 or FP16) and `scale_inv`, FP32 `[1]`; FP32 codes are the values
    themselves."""

    codes: Tensor
    scale_inv: Tensor

    @classmethod
    def zeros(cls, like: Tensor, dtype: torch.dtype) -> "ScaledTensor":
        """Zeros of the shape and on the device of `like`, as codes of `dtype` under a scale of 1."""
        codes = torch.zeros_like(like, dtype=dtype, requires_grad=False)
        return cls(codes, torch.ones(1, device=like.device))

    def read(self) -> Tensor:
        """The values, as a new FP32 tensor."""
        numbers = code_values(self.codes) if self.codes.dtype == torch.float8_e4m3fn else self.codes.float()
        return numbers * self.scale_inv

    def write(self, values: Tensor, scale_inv: float | None = None) -> None:
        """Store FP32 values.

        `scale_inv` is used if it represents all of them exactly, as it does if they were read with it. Otherwise the
        scale is FusedAdam's (fused_adam.py, _apply_scale), amax / largest code; or 1 if the reciprocal of that is not
        finite. Such a tensor is close to zero, and FusedAdam would make it NaN.
        """
        if self.codes.dtype == torch.float32:
            self.codes.copy_(values)
            return
        if scale_inv is not None:
            carried = torch.full_like(self.scale_inv, scale_inv)
            self.set(values, carried.reciprocal(), carried)
            if torch.equal(self.read(), values):
                return
        largest = amax(values)
        inverse = largest / torch.full_like(largest, _LARGEST[self.codes.dtype])
        scale = inverse.reciprocal()
        usable = scale.isfinite() & (scale > 0)
        scale, inverse = torch.where(usable, scale, 1.0), torch.where(usable, inverse, 1.0)
        # The kernel that casts to FP8 stores the reciprocal of the scale, which may differ from `inverse` by rounding
        self.set(values, scale, scale.reciprocal() if self.codes.dtype == torch.float8_e4m3fn else inverse)

    def count_unmoved_by(self, change: float) -> Tensor:
        """The number of FP16 values so large that adding `change` is rounded away, int64 `[]`."""
        exponent = torch.frexp(self.codes.float()).exponent
        half_a_step = torch.exp2((exponent - 12).float()) * self.scale_inv  # 11 bits, the first of which is 2^(e-1)
        return ((half_a_step > change) & (self.codes != 0)).sum()

    def zero_underflow(self) -> None:
        """Set the tensor to zero if FusedAdam has made it NaN because it was too small for a scale (see `write`)."""
        lost = self.scale_inv.reciprocal().isinf()
        self.codes.view(torch.uint8).masked_fill_(lost, 0)
        self.scale_inv.masked_fill_(lost, 1.0)

    def set(self, values: Tensor, scale: Tensor, scale_inv: Tensor) -> None:
        """Encode FP32 values with `scale`, and store `scale_inv` to decode them with."""
        if self.codes.dtype == torch.float16:
            self.codes.copy_(values * scale)
        else:
            self.codes.copy_(encode(values, scale, self.codes.dtype))
        self.scale_inv.fill_(scale_inv.squeeze())
