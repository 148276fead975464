"""Zero points of integers of 4 or 8 bits, as compressed-tensors packs them: an int32 has those of eight or four rows of
a column, the first in its lowest bits, each plus 8 or 128 as codes are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from precisionctl.codes import nibbles
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor


def unpacked(words: Tensor, rows: int, bits: int) -> Tensor:
    """FP32 `[rows, columns]`, of int32 `[ceil(rows * bits / 32), columns]`."""
    stored = nibbles.laid_out(words.t()).view(torch.uint8)
    return nibbles.unpack_bits(stored, bits)[:, :rows].t().float() - (1 << bits - 1)


def packed(zeros: Tensor, bits: int) -> Tensor:
    """The inverse of `unpacked`; bits for no row are zero."""
    each = 32 // bits
    codes = zeros.new_zeros(zeros.shape[1], -(-len(zeros) // each) * each, dtype=torch.uint8)
    codes[:, : len(zeros)] = zeros.t() + (1 << bits - 1)
    return nibbles.laid_out(nibbles.pack_bits(codes, bits).view(torch.int32).t())
