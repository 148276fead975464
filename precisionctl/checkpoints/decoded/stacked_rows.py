"""StackedRows: codes of a matrix of which a word has those of several rows, a part of all rows apart, as HQQ, SINQ and
quanto pack them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precisionctl.checkpoints.chunks import Box, Chunked, read_box
from precisionctl.dtypes import DType
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

PACKINGS: Mapping[str, tuple[int, int, DType]] = {
    "8bit_u8": (8, 1, DType.uint8),
    "4bit_u8": (4, 2, DType.uint8),
    "3bit_32": (3, 10, DType.int32),
    "2bit_u8": (2, 4, DType.uint8),
    "1bit_u8": (1, 8, DType.uint8),
}
"""The bits of a code, how many codes a word has, and its dtype, by HQQ's names."""


@dataclass(frozen=True)
class StackedRows:
    """The tensor `name` of words `[held, columns]`, for a matrix `[rows, columns]` of codes of so many `bits`,
    `in_word` of them in a word. The matrix begins with the codes in the highest bits (`from_high`), or the lowest; the
    last rows of words may be filling in part."""

    name: str
    rows: int
    columns: int
    bits: int
    in_word: int
    from_high: bool

    @property
    def whole(self) -> Box:
        """All of the matrix."""
        return Box(0, self.rows, 0, self.columns)

    @property
    def held(self) -> int:
        return -(-self.rows // self.in_word)

    def codes(self, stored: Chunked, box: Box, dtype: torch.dtype) -> Tensor:
        """The codes of a box of the matrix, as numbers of a dtype."""
        values = torch.empty(box.rows, box.columns, dtype=dtype)
        for place in range(box.row // self.held, (box.row + box.rows - 1) // self.held + 1):
            first, stop = max(box.row, place * self.held), min(box.row + box.rows, (place + 1) * self.held)
            here = Box(first - place * self.held, stop - first, box.column, box.columns)
            shift = self.bits * (self.in_word - 1 - place if self.from_high else place)
            words = read_box(stored, self.name, here)
            values[first - box.row : stop - box.row] = words >> shift & (1 << self.bits) - 1
        return values
