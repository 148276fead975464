"""Elements: the number formats of codes, before any scale, and how files pack those that are not FP8.

An encoding is an element, a grid of scales (`codes/encoding.py`) and a packing. Rows of packed codes are bytes in
memory, as they are in files: of four bits two in each, the first in its low half (`codes/nibbles.py`), or INT8
(`codes/integers.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
    largest magnitude under a scale becomes. `bits` are those of a code."""

    name: str
    dtype: DType
    stored: str
    largest: float
    of_amax: float
    bits: int = 8

    @property
    def is_fp8(self) -> bool:
        """Whether it is floating point of eight bits, which has codes for NaN."""
        return self.dtype in FP8

    @property
    def is_integer(self) -> bool:
        """Whether its numbers are all integers from `-largest - 1` to `largest`, from which zero points may be
        taken."""
        return self.stored.startswith("int")

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
E2M1 = Element("E2M1", DType.uint8, "float4_e2m1fn_x2", 6.0, 6.0, bits=4)
INT4 = Element("INT4", DType.uint8, "int4", 7.0, 7.5, bits=4)
"""Stored as the number plus 8. compressed-tensors divides twice the amax by 15, so that one of the two signs has 8."""
INT8 = Element("INT8", DType.int8, "int8", 127.0, 127.5)
INT8_PLUS_128 = Element("INT8", DType.uint8, "int8", 127.0, 127.5)
"""Stored in two's complement, or as the number plus 128, which is how compressed-tensors packs it into words."""

FP8: Mapping[DType, Element] = {each.dtype: each for each in (E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ)}
"""The elements of FP8, by the dtype of their codes. FNUZ are AMD's, of another bias and without negative zero."""


@dataclass(frozen=True)
class Packing:
    """How a file stores the codes of a weight `[rows, columns]`, in a format called `name`: in a tensor with
    the weight's name and a `suffix`, in words of dtype `word` with the first code in the lowest bits. The tensor is
    `[rows, words]`, or, with a `block`, has that many words in its last dimension."""

    name: str
    element: Element
    word: DType
    suffix: str = ""
    block: int | None = None

    @property
    def codes_in_word(self) -> int:
        return 8 * self.word.itemsize // self.element.bits

    def row_bytes(self, columns: int) -> int:
        """The bytes of a row of this many codes, in whole words."""
        return -(-columns // self.codes_in_word) * self.word.itemsize

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of the stored tensor."""
        words = -(-columns // self.codes_in_word)
        return (rows, words) if self.block is None else (rows, words // self.block, self.block)


class Cast(ABC):
    """What values become when they are written and read again. It depends on the values of a row alone, or of
    `rows_together` of them."""

    rows_together = 1

    @property
    @abstractmethod
    def in_words(self) -> str:
        """What values are cast to."""

    @property
    @abstractmethod
    def share_a_scale(self) -> int | None:
        """How many values of a row have one scale; None where there are no scales."""

    @abstractmethod
    def rounded(self, values: Tensor) -> Tensor:
        """What values `[rows, columns]` are read as, FP32 of the same shape."""


@dataclass(frozen=True)
class ToDType(Cast):
    """Values that are rounded to a dtype."""

    dtype: DType

    @property
    def in_words(self) -> str:
        return self.dtype.value

    @property
    def share_a_scale(self) -> None:
        return None

    def rounded(self, values: Tensor) -> Tensor:
        return values.to(self.dtype.torch).float()


@dataclass(frozen=True)
class CodesInRows(Packing, Cast):
    """A packing with the scales: a row of values becomes a row of bytes, whatever the others are. So a plan need not
    say how such codes are made: writing them is a cast."""

    @property
    def in_words(self) -> str:
        return self.name

    @property
    @abstractmethod
    def largest(self) -> float:
        """The largest number of which codes are made. Some formats have larger ones, of one sign or in other
        company."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Bytes `[rows, row_bytes]` of finite values `[rows, columns]`, whose columns are whole groups."""


@dataclass(frozen=True)
class KeptCodes(Packing, ABC):
    """A packing of four-bit codes with the scales of their groups, in which such codes are kept as they are."""

    @abstractmethod
    def rows_of(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Rows `[rows, row_bytes]`, of bytes of two codes each, the first in the low half, `[rows, columns / 2]`, and
        bytes of scales, `[rows, groups]`."""
