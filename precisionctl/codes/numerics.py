"""FP8 arithmetic: amax, scale, encode and decode.

It is that of Transformer Engine's CUDA kernels, FP32 operation by FP32 operation. Scales of one tensor (`[]`) and of
several (`[N]`) are computed alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, Literal

import numpy as np

from precisionctl.codes.elements import FP8, Element
from precisionctl.dtypes import DType
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

BLOCK, MX_BLOCK = 128, 32
"""Elements that share a scale in Float8BlockScaling, along a row or on each side of a weight's square, and in MXFP8."""

PIECE = 128 * 1024
"""Elements to cast at a time: FP32 scratch of this size (512 KiB) stays in a CPU core's cache."""

_FP32_MAX = float(np.finfo(np.float32).max)
_FP32_EXPONENT, _FP32_MANTISSA = 0x7F800000, 0x007FFFFF
INTEGERS = {1: DType.uint8, 2: DType.int16, 4: DType.int32, 8: DType.int64}
"""The integer dtype with an element's bits, by its number of bytes."""


def amax(values: Tensor) -> Tensor:
    """Largest magnitude, FP32 `[]`. NaN is passed over, as by the `fmaxf` of TE's cast kernels; 0 when empty."""
    values = values.detach()
    if values.is_cpu:
        return amax_and_nan(values)[0]
    # Testing for NaN first would synchronise with the GPU once per tensor.
    return _largest_magnitude(_without_nan(values)) if values.numel() else torch.zeros((), device=values.device)


def amax_and_nan(values: Tensor) -> tuple[Tensor, bool]:
    """`amax` of values on a CPU, FP32 `[]`, and whether any of them is NaN. Both come from one pass over the values."""
    if values.numel() == 0:
        return torch.zeros(()), False
    largest = _largest_magnitude(values)
    has_nan = bool(largest.isnan())
    return (_largest_magnitude(_without_nan(values)) if has_nan else largest), has_nan


def has_nan(values: Tensor) -> bool:
    """Whether any of the values, on a CPU, is NaN."""
    # A NaN makes the sum NaN, and a sum takes half the time of a copy. So do infinities of both signs: `isnan` decides.
    return bool(values.sum().isnan()) and bool(values.isnan().any())


def restore_signs_of_nan(rounded: Tensor, values: Tensor) -> None:
    """Give each NaN among `rounded` the sign that it has among `values`, of the same shape. FP8 has two codes for NaN,
    and PyTorch rounds either to a negative one in BF16."""
    if rounded is not values:
        nan = values.isnan()
        signs = torch.where(values[nan].signbit(), -1.0, 1.0)
        rounded[nan] = rounded.new_full((), torch.nan).copysign(signs.to(rounded.dtype))


def are_finite(values: Tensor) -> bool:
    """Whether all of the values are finite; also false where their sum overflows."""
    return bool(values.sum().isfinite())  # as in `has_nan`, a sum is fastest


def has_infinity(values: Tensor) -> bool:
    """Whether any of the values, on a CPU, is infinite."""
    return not are_finite(values) and bool(values.isinf().any())


def underflows(values: Tensor, codes: Tensor) -> int:
    """How many nonzero values, on a CPU, have the code zero; `codes` are of `values`' shape.

    An approximation for reports: where at most one code in a thousand is zero it returns 0 without counting the zeros
    among the values.
    """
    zeros = _zeros(codes.view(torch.int8))
    return zeros - _zeros(values.view(INTEGERS[values.dtype.itemsize].torch)) if zeros > codes.numel() // 1000 else 0


def _zeros(bits: Tensor) -> int:
    """How many floating-point numbers are +0 or -0, given their bits as integers. NumPy counts ten times as fast as
    PyTorch."""
    return bits.numel() - int(np.count_nonzero(bits.numpy() & torch.iinfo(bits.dtype).max))


def of_largest_magnitude(values: Tensor) -> Tensor:
    """Of each row the value of the largest magnitude, `[rows, 1]`; of a number and its negative the first, and no -0.
    `argmax` takes five times as long as two extremes."""
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    found = torch.where(high > -low, high, low)
    if len(both := (high == -low).view(-1).nonzero().view(-1)):
        rows = values[both]
        found[both] = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    return found.add_(0.0)


def _largest_magnitude(values: Tensor) -> Tensor:
    low, high = torch.aminmax(values)
    return torch.maximum(-low, high).abs().float()  # of zeros 0.0 and not -0.0


def _without_nan(values: Tensor) -> Tensor:
    return values.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)


def row_amax(values: Tensor, scratch: Tensor) -> Tensor:
    """`amax` of each row of `[rows, columns]`, FP32 `[rows, 1]`; `scratch` is FP32 of any size, best PIECE."""
    return row_amax_and_nan(values, scratch)[0]


def row_amax_and_nan(values: Tensor, scratch: Tensor) -> tuple[Tensor, bool]:
    """`row_amax`, and whether any value is NaN. Both come from one pass over the values."""
    # Without the sign bit, floats compare as their bits do as integers, and an integer maximum is four times as fast as
    # a floating-point amin and amax.
    bits = values.view(INTEGERS[values.dtype.itemsize].torch)
    columns = bits.shape[1]
    room = scratch.view(bits.dtype) if 4 * scratch.numel() >= values[:1].nbytes else torch.empty_like(bits[0])
    largest = bits.new_empty(len(bits), 1)
    step = room.numel() // columns
    for row in range(0, len(bits), step):
        piece = bits[row : row + step]
        magnitudes = room[: piece.numel()].view(piece.shape)
        torch.bitwise_and(piece, torch.iinfo(bits.dtype).max, out=magnitudes)
        torch.amax(magnitudes, 1, keepdim=True, out=largest[row : row + step])
    amax = largest.view(values.dtype).float()
    has_nan = bool(amax.isnan().any())
    return (row_amax(_without_nan(values), scratch) if has_nan else amax), has_nan


def largest_code(dtype: torch.dtype) -> float:
    """The largest finite number of an FP8 dtype."""
    return FP8[DType.of(dtype)].largest


def scaled_max(dtype: torch.dtype, margin: int) -> float:
    """`fp8_max * 2**-margin`: what TE's kernel divides by the amax to get a scale. Exact in FP32."""
    return largest_code(dtype) * 2.0**-margin


def delayed_scale(amax: Tensor, previous: Tensor, dtype: torch.dtype, margin: int) -> Tensor:
    """Scale for an amax, FP32: `scaled_max / amax`, at most the largest float; the previous one where amax is
    zero, infinite or NaN (delayed_scaling.cu, kernel_bulk)."""
    usable = amax.isfinite() & (amax > 0)
    scale = torch.where(usable, quotient(scaled_max(dtype, margin), amax), previous)
    return torch.where(scale.isinf(), _FP32_MAX, scale)


def current_scale(amax: Tensor, dtype: torch.dtype, *, power_of_2: bool = False, largest: float = _FP32_MAX) -> Tensor:
    """Scale for a tensor's own amax, FP32; 1 where amax is zero, infinite or NaN (recipe_common.cuh,
    compute_scale_from_amax, with its epsilon of 0). `power_of_2` rounds it down to a power of two; `largest` stands in
    for a scale beyond FP32."""
    usable = amax.isfinite() & (amax != 0)
    scale = torch.where(usable, quotient(largest_code(dtype), amax), 1.0)
    scale = torch.where(scale.isinf(), largest, scale)
    return (scale.view(torch.int32) & _FP32_EXPONENT).view(torch.float32) if power_of_2 else scale


def block_scale(amax: Tensor, dtype: torch.dtype, *, power_of_2: bool = True, largest: float = _FP32_MAX) -> Tensor:
    """Scale of a block for its amax under TE's Float8BlockScaling, FP32: that of current scaling, rounded down to a
    power of two unless told not to. `largest` is that of the tensor's own dtype (compute_scale_from_types)."""
    return current_scale(amax, dtype, power_of_2=power_of_2, largest=largest)


def mx_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale of an MX block for its amax, FP32 of the same shape: 1 / (`amax / fp8_max` rounded up to a power of two,
    which an E8M0 byte holds). `amax` must not be NaN.

    As TE computes it since 2.13 (ptx_arch_spec.cuh, float_to_e8m0; ptx.cuh, exp2f_rcp). Before 2.13 the E8M0 byte 0
    gave the scale 1.
    """
    bits = (amax.float() * (1.0 / largest_code(dtype))).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = (exponent + up).clamp(max=254)  # an infinity is stored as the largest exponent
    return torch.exp2((127 - exponent).float())


def quotient(numerator: float, amax: Tensor) -> Tensor:
    """`numerator / amax`, FP32, with one rounding."""
    # PyTorch computes `number / tensor` as a reciprocal and a product: two roundings, where TE's kernel has one.
    return torch.full_like(amax, numerator) / amax


def encode(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """TE's cast: codes `saturate(values * scale)`, of `values`' shape. NaN stays NaN, infinity becomes the
    largest code. `scale` is FP32: `[]` or `[1]`, or `[rows, 1]` for values `[rows, ...]`."""
    rows = values.detach().reshape(values.shape[0] if values.dim() else 1, math.prod(values.shape[1:]))
    codes = torch.empty(rows.shape, dtype=dtype, device=values.device)
    _encode_pieces(rows, torch.Tensor.mul_, scale, codes, scratch_for(values))
    return codes.view(values.shape)


def scratch_for(values: Tensor) -> Tensor:
    """FP32 scratch to encode or decode with: PIECE elements on a CPU; on a GPU, where each launch costs time, room for
    all values at once."""
    return torch.empty(PIECE if values.device.type == "cpu" else max(PIECE, values.numel()), device=values.device)


SMALLEST_SCALE, LARGEST_SCALE = 2.0**-63, 2.0**25
"""Limits of scale_inv with which engines can compute. Below the smallest, the product of a weight's and an input's is
not a normal number of FP32; above the largest, every code but zero decodes to a number beyond FP16 (the smallest code,
2^-9, to 2^16)."""


def scale_inv(amax: Tensor, element: Element) -> Tensor:
    """What inference formats store: `amax / element.of_amax`, FP32; 1 where that is zero, infinite or NaN."""
    stored = amax / torch.full_like(amax, element.of_amax)
    return torch.where(stored.isfinite() & (stored > 0), stored, 1.0)


ScaleRounding = Literal["FP32", "BF16", "powers of 2"]
"""The values that new scales are rounded up to: any FP32 number, any BF16 number, or powers of two."""


def rounded_up(scales: Tensor, rounding: ScaleRounding) -> Tensor:
    """Positive scales (as `scale_inv`, FP32) rounded up to such numbers, FP32: up, so that no value saturates."""
    if rounding == "BF16":
        return ((scales.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    return power_of_2_above(scales) if rounding == "powers of 2" else scales


def power_of_2_above(scales: Tensor) -> Tensor:
    """Positive FP32 numbers rounded up to powers of two, within E8M0's range of 2**-127 to 2**127."""
    bits = scales.view(torch.int32)
    above = (bits + _FP32_MANTISSA & _FP32_EXPONENT).clamp(max=254 << 23)
    return torch.where(bits <= 1 << 22, 1 << 22, above).view(torch.float32)  # 2**-127 is not a normal number


def encode_by_scale_inv(values: Tensor, scale_inv: Tensor, codes: Tensor, scratch: Tensor) -> None:
    """The cast of inference formats: `saturate(values / scale_inv)` into `codes`, both `[rows, columns]`.

    It divides by the number that is stored, so that every code can be computed again from the file alone; multiplying
    by its reciprocal would round twice. `scale_inv` is FP32 `[]`, `[1]`, `[rows, 1]` or `[rows, columns]`; `scratch` is
    FP32 of any size, best PIECE.
    """
    _encode_pieces(values, torch.Tensor.div_, scale_inv, codes, scratch)


def _encode_pieces(
    values: Tensor, apply: Callable[[Tensor, Tensor], Tensor], factor: Tensor, codes: Tensor, scratch: Tensor
) -> None:
    """Write `saturate(apply(values, factor))` into `codes`, both `[rows, columns]`, in tiles that fit `scratch`.
    `apply` works in place (`mul_`, `div_`) and in FP32."""
    largest = largest_code(codes.dtype)
    saturates = codes.is_cpu and _cast_saturates(codes.dtype)
    for tile, by, into in _tiles(scratch.numel(), values, factor.expand(values.shape), codes):
        work = scratch[: tile.numel()].view(tile.shape).copy_(tile)
        apply(work, by)
        into.copy_(work if saturates else work.clamp_(-largest, largest))


@functools.cache
def _cast_saturates(dtype: torch.dtype) -> bool:
    """Whether PyTorch's cast to `dtype` on a CPU saturates, so that no clamp is needed: to E4M3 it does since some
    version after 2.11, to E5M2 not yet."""
    largest = largest_code(dtype)
    beyond = torch.tensor([math.inf, _FP32_MAX, 1.1 * largest]).repeat(64)  # enough for the vectorised path too
    return bool((beyond.to(dtype).float() == largest).all())


def _tiles(room: int, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Cut tensors of one shape `[rows, columns]` in the same way into tiles of at most `room` elements."""
    columns = tensors[0].shape[1]
    bands = zip(*(torch.split(tensor, max(1, room // max(1, columns))) for tensor in tensors), strict=True)
    if columns <= room:
        return bands
    return chain.from_iterable(zip(*(torch.split(row, room, 1) for row in band), strict=True) for band in bands)


def decode(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """Values `codes * scale_inv`, FP32. Rounded to BF16 they encode back to their codes; rounded to FP16, whose range
    is too small, they may not."""
    return code_values(codes) * scale_inv


def decode_by_scale_inv(codes: Tensor, scale_inv: Tensor, values: Tensor, scratch: Tensor) -> None:
    """`decode` into FP32 `values`, of `codes`' shape `[rows, columns]` and both contiguous, on a CPU; `scale_inv` and
    `scratch` as `encode_by_scale_inv` takes them."""
    for tile, by, into in _tiles(scratch.numel(), codes, scale_inv.expand(codes.shape), values):
        _look_up(tile, into, scratch)
        into.mul_(by)


def code_values(codes: Tensor) -> Tensor:
    """The numbers that codes stand for before scaling, FP32, of the same shape and strides.

    On a CPU E4M3 codes are looked up in a table, seven times as fast as PyTorch's own cast.
    """
    if not codes.is_cpu or codes.dtype == torch.float8_e5m2:
        return codes.float()
    if codes.dim() == 2 and not codes.is_contiguous() and codes.t().is_contiguous():
        return code_values(codes.t()).t()
    values, scratch = torch.empty(codes.shape), scratch_for(codes)
    flat = codes.reshape(1, -1)
    for tile, into in _tiles(scratch.numel(), flat, values.view(1, -1)):
        _look_up(tile, into, scratch)
    return values


def _look_up(codes: Tensor, values: Tensor, scratch: Tensor) -> None:
    """Write the numbers of a tile of codes into FP32 `values`; both are contiguous. If their sizes are even, two codes
    at a time: `_pairs` has their two FP32 numbers bit-cast to one FP64, which is only copied."""
    flat, into = codes.view(-1), values.view(-1)
    if any(each.numel() % 2 or each.storage_offset() % 2 for each in (flat, into)):
        into.copy_(flat)
        return
    index = scratch.view(torch.int32)[: flat.numel() // 2].copy_(flat.view(torch.uint16))
    torch.index_select(_pairs(codes.dtype, codes.device), 0, index, out=into.view(torch.float64))


@functools.cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """For each pair of codes, as one uint16, their numbers in FP32, bit-cast to one FP64."""
    with torch.inference_mode(False):  # the cached tensor must also work outside inference mode
        numbers = torch.arange(256, dtype=torch.uint8, device=device).view(dtype).float()
        both = torch.stack([numbers.expand(256, -1), numbers.view(-1, 1).expand(-1, 256)], -1)
        return both.view(torch.float64).view(-1)
