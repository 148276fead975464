"""MLX's codes: of the values in a group of a row, codes, and a scale and for integers a bias that MLX stores apart.

Source: MLX 0.32.4, whose `mx.quantize` gives these bytes on a CPU (mlx/ops.cpp, affine_quantize, fp_quantize;
mlx/backend/cpu/quantized.cpp, quantize; of exponents kernels/fp_quantized.h).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from precisionctl.codes import nibbles, numerics
from precisionctl.codes.elements import E2M1, E4M3, INT4, INT8, CodesInRows, Element, KeptCodes
from precisionctl.codes.group_scales import NVFP4_LARGEST
from precisionctl.dtypes import DType
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

_SMALLEST_STEP = 1e-7


@dataclass(frozen=True)
class MlxMode:
    """One of MLX's modes: what its codes are in words, and the bits and the values of a group that they may have, the
    usual ones first."""

    words: str
    bits: tuple[int, ...]
    groups: tuple[int, ...]
    affine: bool = False


MODES = {
    "affine": MlxMode("integers", (4, 1, 2, 3, 5, 6, 8), (64, 32, 128), affine=True),
    "mxfp4": MlxMode("MXFP4 codes", (4,), (32,)),
    "mxfp8": MlxMode("MXFP8 codes", (8,), (32,)),
    "nvfp4": MlxMode("NVFP4 codes", (4,), (16,)),
}


@dataclass(frozen=True, kw_only=True)
class MlxGroups(CodesInRows):
    """Codes of a `mode`, of so many `bits`, in groups of `group` values. A row is the bytes of its codes, then of its
    scales, then of its biases (`parts`). `values` is the dtype in which values are rounded before, and the dtype of
    scales and biases of integers."""

    mode: str
    bits: int
    group: int
    values: DType

    @property
    def share_a_scale(self) -> int:
        return self.group

    @property
    def largest(self) -> float:
        """The largest number of which codes are made. Of larger ones MLX's own arithmetic overflows, and without a
        scale of the whole tensor NVFP4 has none."""
        if self.mode == "nvfp4":
            return NVFP4_LARGEST
        return float(torch.finfo(self.values.torch).max) / 4

    def parts(self, columns: int) -> dict[str, tuple[DType, int]]:
        """The tensors of a weight whose rows have so many columns: dtype and elements of a row of each."""
        groups = columns // self.group
        stored = {"weight": (DType.uint32, columns * self.bits // 32)}
        if MODES[self.mode].affine:
            return stored | {"scales": (self.values, groups), "biases": (self.values, groups)}
        return stored | {"scales": (DType.uint8, groups)}

    def row_bytes(self, columns: int) -> int:
        return sum(dtype.itemsize * count for dtype, count in self.parts(columns).values())

    def encode(self, values: Tensor) -> Tensor:
        dtype = self.values.torch
        groups = values.to(dtype).float().view(len(values), -1, self.group)  # PyTorch computes faster in FP32
        made = _AS_FLOATS[self.mode](groups, dtype) if self.mode in _AS_FLOATS else self._as_integers(groups)
        return torch.cat([part.reshape(len(values), -1).view(torch.uint8) for part in made], 1)

    def _as_integers(self, groups: Tensor) -> tuple[Tensor, ...]:
        """FP32 throughout. The end of a group's range that is farther from zero is a whole number of steps from it, so
        that zero has a code, and the scale is negative where that end is the upper one. One bit has the two ends."""
        dtype, most = self.values.torch, float((1 << self.bits) - 1)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        from_low = low.abs() > high.abs()
        edge = torch.where(from_low, low, high)
        scale = ((high - low) / torch.full_like(high, most)).clamp(min=_SMALLEST_STEP)
        if self.bits == 1:
            bias = low
        else:
            scale = torch.where(from_low, scale, -scale)
            steps = (edge / scale).round()
            scale = torch.where(steps == 0, scale, edge / steps)
            bias = torch.where(steps == 0, 0.0, edge)
        codes = (groups - bias).div_(scale).round_().clamp_(0, most).to(torch.uint8)
        packed = nibbles.pack_bits(codes.flatten(1), self.bits)
        return packed, scale.to(dtype), bias.to(dtype)

    def rounded(self, values: Tensor) -> Tensor:
        stored = self.encode(values)
        sizes = [dtype.itemsize * count for dtype, count in self.parts(values.shape[1]).values()]
        codes, scales, *biases = (part.contiguous() for part in torch.split(stored, sizes, 1))
        if MODES[self.mode].affine:
            dtype = self.values.torch
            found = affine_values(codes, self.bits, scales.view(dtype), biases[0].view(dtype))
        else:
            found = float_values(codes, self.bits, scale_values(scales, self.mode))
        return found.reshape(values.shape).bfloat16().float()


def mlx_groups(mode: str, bits: int, group: int, values: DType) -> MlxGroups:
    """How MLX makes codes of values of this dtype."""
    if MODES[mode].affine:
        element = INT4 if bits == 4 else INT8
    else:
        element = E2M1 if bits == 4 else E4M3
    name = f"MLX's {codes_in_words(mode, bits)}"
    return MlxGroups(name, element, DType.uint8, mode=mode, bits=bits, group=group, values=values)


@dataclass(frozen=True, kw_only=True)
class _KeptMxfp4(MlxGroups, KeptCodes):
    """MXFP4 of such codes as they are."""

    def rows_of(self, codes: Tensor, scales: Tensor) -> Tensor:
        return torch.cat([codes, scales], 1)


MXFP4 = _KeptMxfp4(
    "MXFP4", E2M1, DType.uint8, mode="mxfp4", bits=4, group=MODES["mxfp4"].groups[0], values=DType.bfloat16
)


def codes_in_words(mode: str, bits: int) -> str:
    return f"{bits}-bit integers" if MODES[mode].affine else MODES[mode].words


def affine_values(codes: Tensor, bits: int, scales: Tensor, biases: Tensor) -> Tensor:
    """`code * scale + bias`, each step rounded to the dtype of the scales: `[rows, groups, values of a group]`. `codes`
    are bytes `[rows, bytes]`."""
    groups = nibbles.unpack_bits(codes, bits).view(*scales.shape, -1).to(scales.dtype)
    return groups.mul_(scales.unsqueeze(-1)).add_(biases.unsqueeze(-1))


def scale_values(scales: Tensor, mode: str) -> Tensor:
    """Scales of floats, stored as bytes, in FP32."""
    return scales.view(torch.float8_e4m3fn if mode == "nvfp4" else torch.float8_e8m0fnu).float()


def float_values(codes: Tensor, bits: int, scales: Tensor) -> Tensor:
    """E2M1 or E4M3 codes under FP32 scales `[rows, groups]`: FP32, `[rows, columns]` or by group."""
    if bits == 8:
        return numerics.code_values(codes.view(torch.float8_e4m3fn)).view(*scales.shape, -1).mul_(scales.unsqueeze(-1))
    values = torch.empty(len(codes), 2 * codes.shape[1])
    nibbles.decode(codes, E2M1, scales, values, torch.empty(nibbles.SCRATCH))
    return values


def _as_mx(
    groups: Tensor, dtype: torch.dtype, element: Element, nearest: Callable[[Tensor], Tensor]
) -> tuple[Tensor, ...]:
    """The scale is the least power of two with which the largest magnitude is not beyond the element's largest number;
    1 for zeros."""
    scales = _of_largest(groups, dtype, element)
    exponents = torch.where(scales == 0, 0, scales.log2().ceil())
    return nearest(_quotients(groups, torch.pow(2.0, exponents), dtype)), (exponents + 127).to(torch.uint8)


def _as_nvfp4(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    scales = _nearest_e4m3(_of_largest(groups, dtype, E2M1))
    by = scales.float()
    return _nearest_e2m1(_quotients(groups, torch.where(by == 0, math.inf, by), dtype)), scales


def _of_largest(groups: Tensor, dtype: torch.dtype, element: Element) -> Tensor:
    """The scale by which a group's largest magnitude is the element's largest number."""
    bits = groups.abs().view(torch.int32)  # which compare as their floats do, three times as fast
    largest = bits.amax(-1, keepdim=True).view(torch.float32)
    return _quotients(largest, torch.full_like(largest, element.largest), dtype)


def _quotients(values: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """What division in the dtype of the values gives, FP32: MLX divides in it."""
    return (values / by.to(dtype)).to(dtype).float()


def _nearest_e4m3(values: Tensor) -> Tensor:
    return values.clamp(-E4M3.largest, E4M3.largest).to(torch.float8_e4m3fn)


def _nearest_e2m1(values: Tensor) -> Tensor:
    """Bytes of two codes each. Of two numbers that are as near, the smaller one; zero has no sign."""
    codes = nibbles.to_e2m1_or_less(values.abs())
    signs = (codes > 0).logical_and_(values < 0)
    return nibbles.pack(signs.view(torch.uint8).bitwise_left_shift_(3).bitwise_or_(codes))


_AS_FLOATS: Mapping[str, Callable[[Tensor, torch.dtype], tuple[Tensor, ...]]] = {
    "mxfp4": partial(_as_mx, element=E2M1, nearest=_nearest_e2m1),
    "mxfp8": partial(_as_mx, element=E4M3, nearest=_nearest_e4m3),
    "nvfp4": _as_nvfp4,
}
