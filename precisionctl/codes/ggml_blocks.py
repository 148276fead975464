"""Codes in ggml's blocks: each has its scale before its codes, so a row of values is a row of bytes.

Source: ggml's ggml-quants.c (quantize_row_q8_0_ref and its like of Q4_0, Q5_0 and Q5_1), ggml-common.h (block_mxfp4,
block_nvfp4). How blocks are laid out and decoded is in `ggml_formats.py`; K-quants are made in `ggml_k_quants.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precisionctl.codes import numerics
from precisionctl.codes.elements import E2M1, INT4, INT8, CodesInRows, Element, KeptCodes, Packing
from precisionctl.codes.ggml_formats import named
from precisionctl.codes.ggml_k_quants import q4_k, q5_k, q6_k
from precisionctl.dtypes import DType
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

    from precisionctl.codes.ggml_formats import BlockFormat


_INT5 = Element("INT5", DType.uint8, "int5", 15.0, 15.5, bits=5)
_INT6 = Element("INT6", DType.uint8, "int6", 31.0, 31.5, bits=6)


@dataclass(frozen=True, kw_only=True)
class BlocksInRows(Packing):
    """How codes and scales of a weight stand in one tensor of bytes, `[rows, bytes]`."""

    format: BlockFormat

    def row_bytes(self, columns: int) -> int:
        return columns // self.format.values * self.format.size

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return rows, self.row_bytes(columns)


@dataclass(frozen=True, kw_only=True)
class GgmlBlocks(BlocksInRows, CodesInRows):
    """Blocks that are made of values: `encoded` makes bytes `[blocks, format.size]` of FP32 values
    `[blocks, format.values]`. `most` is how many times the largest FP16 scale a magnitude may be."""

    encoded: Callable[[Tensor], Tensor]
    most: int

    @property
    def share_a_scale(self) -> int:
        return self.format.values

    @property
    def largest(self) -> float:
        return 65504.0 * self.most

    def encode(self, values: Tensor) -> Tensor:
        return self.encoded(values.float().reshape(-1, self.format.values)).reshape(len(values), -1)

    def rounded(self, values: Tensor) -> Tensor:
        return torch.from_numpy(self.format.values_of(self.encode(values).numpy())).view(values.shape)


def _q8_0(values: Tensor) -> Tensor:
    """An FP16 scale, the largest magnitude / 127, and 32 bytes. Halves are rounded away from zero."""
    scale = values.abs().amax(1, keepdim=True) / 127
    scaled = values * _inverse(scale)
    # The sum is itself rounded: with 0.5, the number just below 0.5 would become 1. The conversion drops fractions.
    codes = scaled.add_(torch.copysign(scaled.new_tensor(_BELOW_HALF), scaled)).to(torch.int8)
    return torch.cat([_fp16(scale), codes.view(torch.uint8)], 1)


_BELOW_HALF = 0.5 - 2.0**-25
"""The FP32 number before 0.5."""


def _q4_0(values: Tensor) -> Tensor:
    """An FP16 scale, by which the largest magnitude becomes -8, and 16 bytes: code i is in the low half of byte i, code
    16 + i in its high half. A code is the number plus 8."""
    scale, codes = _around(values, 8)
    return torch.cat([_fp16(scale), _in_halves(codes)], 1)


def _q5_0(values: Tensor) -> Tensor:
    """The same by which the largest becomes -16, with 4 bytes of the codes' fifth bits before the others."""
    scale, codes = _around(values, 16)
    return torch.cat([_fp16(scale), _fifth_bits(codes), _in_halves(codes & 15)], 1)


def _around(values: Tensor, zero: int) -> tuple[Tensor, Tensor]:
    """FP32 scales, and codes of which `zero` stands for 0. Of scales without an inverse ggml makes codes of 0."""
    scale = numerics.of_largest_magnitude(values) / -zero
    inverse = _inverse(scale)
    codes = (values * inverse).add_(zero + 0.5).clamp_(0, 2 * zero - 1).masked_fill_(inverse.isinf(), 0)
    return scale, codes.to(torch.uint8)


def _q5_1(values: Tensor) -> Tensor:
    """An FP16 scale, a 31st of the values' range, their FP16 minimum, and codes as in Q5_0."""
    lowest, highest = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    scale = (highest - lowest) / torch.tensor(31.0)  # by a number PyTorch multiplies with its inverse
    codes = (values - lowest).mul_(_inverse(scale)).add_(0.5).to(torch.uint8)
    if len(zero := (lowest == 0).view(-1).nonzero().view(-1)):  # of 0 and -0 the first
        rows = values[zero]
        lowest[zero] = rows.gather(1, (rows == 0).to(torch.uint8).argmax(1, keepdim=True))
    return torch.cat([_fp16(scale), _fp16(lowest), _fifth_bits(codes), _in_halves(codes & 15)], 1)


def _fifth_bits(codes: Tensor) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8)
    return ((codes >> 4).view(-1, 4, 8) << places).sum(2, dtype=torch.uint8)


def _in_halves(codes: Tensor) -> Tensor:
    low, high = codes.chunk(2, 1)
    return low | (high << 4)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _fp16(scale: Tensor) -> Tensor:
    return scale.half().view(torch.uint8)


ENCODED = {
    "Q8_0": (INT8, _q8_0, 127),
    "Q4_0": (INT4, _q4_0, 8),
    "Q5_0": (_INT5, _q5_0, 16),
    "Q5_1": (_INT5, _q5_1, 1),
    "Q4_K": (INT4, q4_k, 48),
    "Q5_K": (_INT5, q5_k, 48),
    "Q6_K": (_INT6, q6_k, 112 * 32),
}
"""Of each format that is made here: its element, what makes its blocks, and how many times the largest FP16 scale a
magnitude may be, whatever else is in its block. Where a block has a minimum, it is that which numbers below 0 need:
once in Q5_1, 63 times in Q4_K and Q5_K, which hold 63 * 15 and 63 * 31 times a scale above 0. Scales and minimums of
K-quants are searched, and need some room below 63 and 127: ggml's can be infinite from 3.9e6 on."""


def blocks_of(form: BlockFormat) -> GgmlBlocks:
    """How codes are made in a format of `ENCODED`."""
    element, encoded, most = ENCODED[form.name]
    return GgmlBlocks(form.name, element, DType.uint8, format=form, encoded=encoded, most=most)


class _Mxfp4Blocks(BlocksInRows, KeptCodes):
    """A scale and the codes under it."""

    def rows_of(self, codes: Tensor, scales: Tensor) -> Tensor:
        return torch.cat([scales.reshape(-1, 1), _halves(codes, 32)], 1).view(len(codes), -1)


class _Nvfp4Blocks(BlocksInRows, KeptCodes):
    """Four scales, and 16 codes under each, in turn. A global scale is another tensor. ggml's scales have no sign, and
    one that is below zero is in no Encoding that is read."""

    def rows_of(self, codes: Tensor, scales: Tensor) -> Tensor:
        unsigned = scales.reshape(-1, 4) & 0x7F
        return torch.cat([unsigned, _halves(codes, 16).view(-1, 32)], 1).view(len(codes), -1)


def _halves(codes: Tensor, group: int) -> Tensor:
    """Codes of groups `[groups, group / 2]` as ggml has them: code i is in the low half of byte i, and the one that is
    half a group behind it in the high half."""
    pairs = codes.reshape(-1, group // 2)
    low, high = torch.stack((pairs & 15, pairs >> 4), 2).view(-1, 2, group // 2).unbind(1)
    return low | (high << 4)


MXFP4 = _Mxfp4Blocks("MXFP4", E2M1, DType.uint8, format=named("MXFP4"))
NVFP4 = _Nvfp4Blocks("NVFP4", E2M1, DType.uint8, format=named("NVFP4"))
"""Blocks that are not made of values, but of such codes as they are."""
