"""Elements: the numbers that codes are, before any scale; and how files pack those of four bits.

An encoding is an element, a grid of scales (`fp8/encoding.py`) and a packing. Rows of codes of four bits are bytes in
memory, as they are in files: two in each, the first in its low half (`fp8/nibbles.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precisionctl.dtypes import DType
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Element:
    """A number format of codes: its `name` in words, and its `largest` number. `dtype` is the dtype of codes in memory
    (bytes for four-bit codes), and `stored` PyTorch's name for the codes in files. `of_amax` is the number that the
    largest magnitude under a scale becomes."""

    name: str
    dtype: DType
    stored: str
    largest: float
    of_amax: float

    @property
    def bits(self) -> int:
        return 4 if self.dtype == DType.uint8 else 8

    def differing(self, a: Tensor, b: Tensor) -> int:
        """How many codes of two tensors are not the same."""
        bits = a.view(torch.uint8) ^ b.view(torch.uint8)
        return int((bits != 0).sum()) if self.bits == 8 else int(((bits & 15) != 0).sum() + (bits > 15).sum())


def _fp8(name: str, dtype: DType, largest: float) -> Element:
    return Element(name, dtype, dtype.value, largest, largest)


E4M3 = _fp8("E4M3", DType.float8_e4m3fn, 448.0)
E5M2 = _fp8("E5M2", DType.float8_e5m2, 57344.0)
E4M3_FNUZ = _fp8("E4M3 FNUZ", DType.float8_e4m3fnuz, 240.0)
E5M2_FNUZ = _fp8("E5M2 FNUZ", DType.float8_e5m2fnuz, 57344.0)
E2M1 = Element("E2M1", DType.uint8, "float4_e2m1fn_x2", 6.0, 6.0)
INT4 = Element("INT4", DType.uint8, "int4", 7.0, 7.5)
"""Stored as the number plus 8. compressed-tensors divides twice the amax by 15, so that one of the two signs has 8."""

_BY_DTYPE: Mapping[DType, Element] = {each.dtype: each for each in (E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ)}


def element_of(dtype: DType) -> Element:
    """The element whose codes are stored in a dtype of eight bits."""
    return _BY_DTYPE[dtype]


_CODES_IN_WORD: Mapping[DType, int] = {DType.uint8: 2, DType.int8: 2, DType.int32: 8}


@dataclass(frozen=True)
class Packing:
    """How a file stores the four-bit codes of a weight `[rows, columns]`, in a format called `name`: in a tensor with
    the weight's name and a `suffix`, in words of dtype `word` with the first code in the lowest bits. The tensor is
    `[rows, words]`, or, with a `block`, has that many words in its last dimension."""

    name: str
    element: Element
    word: DType
    suffix: str = ""
    block: int | None = None

    @property
    def codes_in_word(self) -> int:
        return _CODES_IN_WORD[self.word]

    def row_bytes(self, columns: int) -> int:
        """The bytes of a row of this many codes, in whole words."""
        return -(-columns // self.codes_in_word) * self.word.itemsize

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of the stored tensor."""
        words = -(-columns // self.codes_in_word)
        return (rows, words) if self.block is None else (rows, words // self.block, self.block)
