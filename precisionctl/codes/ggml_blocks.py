"""llama.cpp's blocks of 32 codes: each has its scale before its codes, so a row of values is a row of bytes.

Sources: ggml/src/ggml-common.h (block_q8_0, block_q4_0), ggml-quants.c (quantize_row_q8_0_ref, quantize_row_q4_0_ref).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precisionctl.codes.elements import INT4, INT8, Packing
from precisionctl.dtypes import DType
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32
"""Values of a block, all in one row."""


@dataclass(frozen=True)
class GgmlBlocks(Packing):
    """A format of blocks that take `block_bytes` each. `encoded` makes them of FP32 values `[blocks, 32]`."""

    block_bytes: int = 0
    encoded: Callable[[Tensor], Tensor] = lambda values: values

    @property
    def largest(self) -> float:
        """The largest number that a block holds, under the largest FP16 scale."""
        return 65504.0 * (8 if self.element.bits == 4 else self.element.largest)

    def row_bytes(self, columns: int) -> int:
        return columns // BLOCK * self.block_bytes

    def encode(self, values: Tensor) -> Tensor:
        """Bytes `[rows, row_bytes]` of finite values `[rows, columns]`, whose columns are a multiple of 32."""
        return self.encoded(values.float().reshape(-1, BLOCK)).reshape(len(values), -1)


def _q8_0(values: Tensor) -> Tensor:
    """An FP16 scale, the largest magnitude / 127, and 32 bytes. Halves are rounded away from zero."""
    scale = values.abs().amax(1, keepdim=True) / 127
    scaled = values * _inverse(scale)
    codes = (scaled.abs() + 0.5).floor().copysign(scaled)
    codes = torch.where((scaled.abs() % 1) < 0.5, scaled.trunc(), codes)  # the sum above is itself rounded
    return torch.cat([_fp16(scale), codes.to(torch.int8).view(torch.uint8)], 1)


def _q4_0(values: Tensor) -> Tensor:
    """An FP16 scale, by which the largest magnitude becomes -8, and 16 bytes: code i is in the low half of byte i, code
    16 + i in its high half. A code is the number plus 8."""
    at = values.abs().argmax(1, keepdim=True)
    scale = values.gather(1, at) / -8
    codes = (values * _inverse(scale) + 8.5).trunc().clamp(0, 15).to(torch.uint8)
    low, high = codes.chunk(2, 1)
    return torch.cat([_fp16(scale), low | (high << 4)], 1)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _fp16(scale: Tensor) -> Tensor:
    return scale.half().view(torch.uint8)


Q8_0 = GgmlBlocks("Q8_0", INT8, DType.uint8, block_bytes=34, encoded=_q8_0)
Q4_0 = GgmlBlocks("Q4_0", INT4, DType.uint8, block_bytes=18, encoded=_q4_0)
