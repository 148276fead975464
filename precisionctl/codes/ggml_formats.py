"""ggml's formats of tensors: how the values of a row are stored, and FP32 values of it.

A row is blocks of so many values, one after the other. A block has its scales, perhaps minimums, and codes of a few
bits; `FORMATS` has the layout of each format, and what its values are. Each step is rounded to FP32, as gguf-py's
`quants.py` does. Sources: ggml's ggml-common.h (block_*), ggml-quants.c (dequantize_row_*), and gguf-py's quants.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from precisionctl.dtypes import DType

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"

_FLOATS = np.float32
_K = 256
"""Values of a block of the K-quants."""


@dataclass(frozen=True)
class BlockFormat:
    """One of ggml's formats. A block of `values` values is a record of these `fields`, little-endian; `decode` makes
    FP32 `[blocks, values]` of records `[blocks]`. Of plain numbers, `dtype` is theirs, and a block is one of them. With
    `has_global_scale` scales are multiplied by one that is another tensor, which `decode` takes too."""

    name: str
    values: int
    fields: Sequence[tuple[Any, ...]] = field(repr=False, compare=False)
    decode: Callable[..., Array] = field(repr=False, compare=False, default=lambda blocks: blocks)
    dtype: DType | None = None
    has_global_scale: bool = False

    @property
    def size(self) -> int:
        """Bytes of a block."""
        return self._record.itemsize

    @property
    def _record(self) -> np.dtype[Any]:
        return np.dtype(list(self.fields))

    def values_of(self, rows: NDArray[np.uint8], global_scale: float = 1.0) -> NDArray[np.float32]:
        """FP32 `[rows, columns]` of the bytes of whole blocks, `[rows, bytes]`, contiguous."""
        blocks = rows.reshape(-1).view(self._record)
        with np.errstate(invalid="ignore"):  # a damaged scale, infinite, times a code of 0
            decoded = self.decode(blocks, _FLOATS(global_scale)) if self.has_global_scale else self.decode(blocks)
        found: NDArray[np.float32] = decoded.reshape(len(rows), -1)
        return found


def _numbers(name: str, dtype: DType) -> BlockFormat:
    return BlockFormat(name, 1, [("values", f"V{dtype.itemsize}")], dtype=dtype)


def _codes(packed: Array, bits: int, width: int) -> Array:
    """Codes `[blocks, codes]` of bytes `[blocks, bytes]`. Of every `width` bytes, the lowest `bits` come first, one of
    each byte, then the next."""
    whole = np.ascontiguousarray(packed).reshape(len(packed), -1, width)
    codes = np.empty((*whole.shape[:2], 8 // bits, width), np.uint8)
    for place in range(8 // bits):  # broadcasting over places takes three times as long
        np.right_shift(whole, np.uint8(place * bits), out=codes[:, :, place])
    codes &= np.uint8((1 << bits) - 1)
    return codes.reshape(len(packed), -1)


def _scaled(scales: Array, numbers: Array) -> Array:
    """`scale * number` for groups of equal size: `[blocks, groups]` and `[blocks, groups * size]`."""
    groups: Array = numbers.reshape(*scales.shape, -1).astype(_FLOATS)
    groups *= scales[..., None]
    return groups


def _fp32(halves: Array) -> Array:
    found: Array = halves.astype(_FLOATS)[:, None]
    return found


def _nibbles(blocks: Array) -> Array:
    """Codes of four bits: all low halves, then all high ones."""
    return _codes(blocks["qs"], 4, 16)


def _five_bits(blocks: Array) -> Array:
    codes: Array = _nibbles(blocks) | _codes(blocks["qh"], 1, 1) << np.uint8(4)
    return codes


def _around(codes: Array, zero: int) -> Array:
    """Codes as numbers above and below zero."""
    numbers: Array = codes.view(np.int8) - np.int8(zero)
    return numbers


def _above_minimum(blocks: Array, codes: Array) -> Array:
    values = _scaled(_fp32(blocks["d"]), codes)
    values += _fp32(blocks["m"])[..., None]
    return values


def _scales_and_minimums(packed: Array) -> tuple[Array, Array]:
    """Eight scales and eight minimums of six bits, of twelve bytes: the first four of each in the low bits of four
    bytes; the others in halves of the last four, with two bits above those of the first."""
    scales, minimums, others = packed.reshape(-1, 3, 4).swapaxes(0, 1)
    high = np.uint8(0x30)
    return (
        np.concatenate([scales & 0x3F, others & 0x0F | scales >> 2 & high], 1),
        np.concatenate([minimums & 0x3F, others >> 4 | minimums >> 2 & high], 1),
    )


def _less_minimum(blocks: Array, scales: Array, minimums: Array, codes: Array) -> Array:
    values = _scaled(_fp32(blocks["d"]) * scales, codes)
    values -= (_fp32(blocks["dmin"]) * minimums)[..., None]
    return values


def _q2_k(blocks: Array) -> Array:
    return _less_minimum(blocks, blocks["scales"] & 15, blocks["scales"] >> 4, _codes(blocks["qs"], 2, 32))


def _q3_k(blocks: Array) -> Array:
    low, high = _codes(blocks["scales"][:, :8], 4, 8), _codes(blocks["scales"][:, 8:], 2, 4)
    scales = _fp32(blocks["d"]) * _around(low | high << np.uint8(4), 32)
    return _scaled(scales, _around(_codes(blocks["qs"], 2, 32) | _codes(blocks["hmask"], 1, 32) << np.uint8(2), 4))


def _q4_k(blocks: Array) -> Array:
    return _less_minimum(blocks, *_scales_and_minimums(blocks["scales"]), _codes(blocks["qs"], 4, 32))


def _q5_k(blocks: Array) -> Array:
    codes = _codes(blocks["qs"], 4, 32) | _codes(blocks["qh"], 1, 32) << np.uint8(4)
    return _less_minimum(blocks, *_scales_and_minimums(blocks["scales"]), codes)


def _q6_k(blocks: Array) -> Array:
    codes = _codes(blocks["ql"], 4, 64) | _codes(blocks["qh"], 2, 32) << np.uint8(4)
    return _scaled(_fp32(blocks["d"]) * blocks["scales"], _around(codes, 32))


_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the numbers of E2M1's codes; ggml has no negative zero (ggml-common.h, kvalues_mxfp4)."""
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""The numbers of IQ4's codes (ggml-common.h, kvalues_iq4nl)."""


def _mxfp4(blocks: Array) -> Array:
    halves = np.ldexp(_FLOATS(1), blocks["e"].astype(np.int32) - 128)
    return _scaled(halves[:, None], _E2M1_DOUBLED[_nibbles(blocks)])


def _number_of_e4m3(code: int) -> float:
    """That of a scale, whose sign ggml ignores, and of which NaN is 0 (ggml-impl.h, ggml_ue4m3_to_fp32)."""
    exponent, fraction = code >> 3 & 15, (code & 7) / 8
    number = (1 + fraction) * 2.0 ** (exponent - 7) if exponent else fraction * 2.0**-6
    return 0.0 if code == 0x7F else number


_E4M3 = np.array([_number_of_e4m3(code) for code in range(256)], _FLOATS)


def _nvfp4(blocks: Array, global_scale: np.float32) -> Array:
    """Scales are multiplied first, as ModelOpt and compressed-tensors do; ggml multiplies results by the global one."""
    halves = _E4M3[blocks["d"]] * global_scale * _FLOATS(0.5)
    return _scaled(halves, _E2M1_DOUBLED[_codes(blocks["qs"], 4, 8)])


def _iq4_xs(blocks: Array) -> Array:
    high = blocks["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    low = _codes(blocks["scales_l"], 4, 1)
    scales = _fp32(blocks["d"]) * _around(low | high.astype(np.uint8) << np.uint8(4), 32)
    return _scaled(scales, _IQ4[_nibbles(blocks)])


_D = ("d", "<f2")
_BYTES = np.uint8
_SCALES_AND_MINIMUMS = (_D, ("dmin", "<f2"), ("scales", _BYTES, 12))

FORMATS: Mapping[int, BlockFormat] = {
    0: _numbers("F32", DType.float32),
    1: _numbers("F16", DType.float16),
    30: _numbers("BF16", DType.bfloat16),
    2: BlockFormat(
        "Q4_0", 32, [_D, ("qs", _BYTES, 16)], lambda blocks: _scaled(_fp32(blocks["d"]), _around(_nibbles(blocks), 8))
    ),
    3: BlockFormat(
        "Q4_1", 32, [_D, ("m", "<f2"), ("qs", _BYTES, 16)], lambda blocks: _above_minimum(blocks, _nibbles(blocks))
    ),
    6: BlockFormat(
        "Q5_0",
        32,
        [_D, ("qh", _BYTES, 4), ("qs", _BYTES, 16)],
        lambda blocks: _scaled(_fp32(blocks["d"]), _around(_five_bits(blocks), 16)),
    ),
    7: BlockFormat(
        "Q5_1",
        32,
        [_D, ("m", "<f2"), ("qh", _BYTES, 4), ("qs", _BYTES, 16)],
        lambda blocks: _above_minimum(blocks, _five_bits(blocks)),
    ),
    8: BlockFormat("Q8_0", 32, [_D, ("qs", np.int8, 32)], lambda blocks: _scaled(_fp32(blocks["d"]), blocks["qs"])),
    10: BlockFormat("Q2_K", _K, [("scales", _BYTES, 16), ("qs", _BYTES, 64), _D, ("dmin", "<f2")], _q2_k),
    11: BlockFormat("Q3_K", _K, [("hmask", _BYTES, 32), ("qs", _BYTES, 64), ("scales", _BYTES, 12), _D], _q3_k),
    12: BlockFormat("Q4_K", _K, [*_SCALES_AND_MINIMUMS, ("qs", _BYTES, 128)], _q4_k),
    13: BlockFormat("Q5_K", _K, [*_SCALES_AND_MINIMUMS, ("qh", _BYTES, 32), ("qs", _BYTES, 128)], _q5_k),
    14: BlockFormat("Q6_K", _K, [("ql", _BYTES, 128), ("qh", _BYTES, 64), ("scales", np.int8, 16), _D], _q6_k),
    20: BlockFormat(
        "IQ4_NL", 32, [_D, ("qs", _BYTES, 16)], lambda blocks: _scaled(_fp32(blocks["d"]), _IQ4[_nibbles(blocks)])
    ),
    23: BlockFormat("IQ4_XS", _K, [_D, ("scales_h", "<u2"), ("scales_l", _BYTES, 4), ("qs", _BYTES, 128)], _iq4_xs),
    39: BlockFormat("MXFP4", 32, [("e", _BYTES), ("qs", _BYTES, 16)], _mxfp4),
    40: BlockFormat("NVFP4", 64, [("d", _BYTES, 4), ("qs", _BYTES, 32)], _nvfp4, has_global_scale=True),
}
"""By ggml's number of the type (ggml.h, ggml_type)."""

UNREAD = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    41: "Q1_0",
    42: "Q2_0",
}
"""Those that are refused by their names: what is looked up in tables of a thousand numbers, or is no weight."""


def named(name: str) -> BlockFormat:
    """The format of this name."""
    return next(form for form in FORMATS.values() if form.name == name)
