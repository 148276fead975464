"""Four-bit codes, E2M1 and INT4, two in a byte, the earlier one in the low half: decoding, and encoding of values.

Eight in an int32, the first in its lowest bits, are the same bytes in memory: `words.view(torch.uint8)`. Sources: OCP
Microscaling Formats (MX) 1.0, section 5.3.3, for E2M1; compressed-tensors' `pack_to_int32` for INT4, a number + 8.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from precisionctl.codes.elements import E2M1, INT4, Element
from precisionctl.codes.numerics import INTEGERS, PIECE
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODE_VALUES: Mapping[Element, tuple[float, ...]] = {
    E2M1: (*_E2M1, *(-number for number in _E2M1)),
    INT4: tuple(float(number) for number in range(-8, 8)),
}
"""The number of each code. E2M1 has a negative zero, code 8."""

_POWERS = {E2M1: 1, INT4: 0}
"""How many buffers for powers of two rounding to an element takes."""

SCRATCH = 3 * PIECE
"""Elements of FP32 scratch to work in. A piece needs up to four buffers of its size, and twenty calls of PyTorch."""


def decode(
    packed: Tensor, element: Element, scales: Tensor, values: Tensor, scratch: Tensor, zeros: Tensor | None = None
) -> None:
    """`number * scale`, or `(number - zero) * scale`, in FP32, into `values`, FP32 `[rows, columns]`, contiguous.

    `packed` is uint8 `[rows, bytes]`, where the last bytes of a row may be filling; `scales` FP32 `[rows, groups]`, for
    groups of equal size, so `[rows, columns]` is one for each element; `zeros` numbers of the element, FP32, of
    `scales`' shape; `scratch` FP32 of any size, best SCRATCH.
    """
    if 2 * packed.shape[1] != values.shape[1]:  # the last bytes of rows are filling
        filled = torch.empty(len(packed), 2 * packed.shape[1], device=values.device)
        decode(packed, element, filled.new_ones(1, 1).expand(len(packed), 1), filled, scratch)
        values.copy_(filled[:, : values.shape[1]])
    for rows, (work,) in _bands(values, scratch, 1):
        into, by = values[rows], scales[rows].unsqueeze(-1)
        if 2 * packed.shape[1] == values.shape[1]:
            index = work.view(torch.int32)[: packed[rows].numel()].copy_(packed[rows].reshape(-1))
            torch.index_select(_pairs(element, values.device), 0, index, out=into.view(-1).view(torch.float64))
        groups = into.view(*scales[rows].shape, -1)
        if zeros is not None:
            groups.sub_(zeros[rows].unsqueeze(-1))
        groups.mul_(by)


def underflows(values: Tensor, element: Element, packed: Tensor) -> int:
    """How many nonzero values, on a CPU, have the code of zero. Shapes are those of `decode`."""
    zero, bits = (0, 7) if element == E2M1 else (CODE_VALUES[element].index(0.0), 15)
    codes = packed.numpy()
    zeros = sum(int(np.count_nonzero((codes & bits << shift) == zero << shift)) for shift in (0, 4))
    filling = len(packed) * (2 * packed.shape[1] - values.shape[1])
    return zeros - filling - (values.numel() - int(values.count_nonzero()))


def encode(
    values: Tensor, element: Element, scales: Tensor, packed: Tensor, scratch: Tensor, zeros: Tensor | None = None
) -> None:
    """The codes of the numbers nearest to `values / scale`, or `values / scale + zero`, in FP32, into `packed`; of two
    that are as near, the even one. What is beyond the largest number becomes it.

    Shapes are those of `decode`; filling becomes the code of zero. A zero of E2M1 keeps the sign of its value, as
    compressed-tensors' does, so that codes decoded to BF16 and encoded again are the same. There is no code for NaN:
    it gives an arbitrary one.
    """
    filling = 2 * packed.shape[1] - values.shape[1]
    for rows, (quotients, *powers) in _bands(values, scratch, 1 + _POWERS[element]):
        quotients.view(values[rows].shape).copy_(values[rows])
        groups = quotients.view(*scales[rows].shape, -1).div_(scales[rows].unsqueeze(-1))
        if zeros is not None:
            groups.add_(zeros[rows].unsqueeze(-1))
        codes = _to_e2m1(quotients, *powers) if element == E2M1 else _to_int4(quotients)
        codes = codes.view(values[rows].shape)
        if element == E2M1:
            codes.bitwise_or_(_signs(values[rows]))
        if filling:
            codes = torch.nn.functional.pad(codes, (0, filling), value=CODE_VALUES[element].index(0.0))
        packed[rows] = pack(codes)


def _bands(values: Tensor, scratch: Tensor, buffers: int) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Split rows into bands for which FP32 `scratch` has room for this many `buffers`. Yields each band's rows and its
    buffers, `[elements]` each. Scratch that is too small for one row is not used."""
    rows, columns = values.shape
    room = scratch.numel() // buffers
    work = scratch[: room * buffers] if room >= columns else scratch.new_empty(buffers * columns)
    work = work.view(buffers, -1)
    step = max(1, work.shape[1] // max(1, columns))
    for row in range(0, rows, step):
        yield slice(row, row + step), work[:, : min(step, rows - row) * columns].unbind()


def squared_errors(values: Tensor, element: Element, choices: Sequence[Tensor], scratch: Tensor) -> list[Tensor]:
    """What `encode` loses of `values` `[rows, columns]` in each group, with each of the `choices` as its `scales`: sums
    of squared differences, FP32 `[rows, groups]` for each."""
    errors = [torch.empty_like(scales) for scales in choices]
    for rows, (numbers, quotients, nearest, *powers) in _bands(values, scratch, 3 + _POWERS[element]):
        numbers.view(values[rows].shape).copy_(values[rows])
        if element == E2M1:
            numbers.abs_()
        for scales, error in zip(choices, errors, strict=True):
            shape = (*scales[rows].shape, -1)
            torch.div(numbers.view(shape), scales[rows].unsqueeze(-1), out=quotients.view(shape))
            if element == E2M1:
                _count_steps(quotients, nearest, *powers).sub_(*powers, alpha=_TO_HALF_ULP).clamp_(max=6)
            else:
                torch.round(quotients, out=nearest).clamp_(-8, 7)
            torch.sum(quotients.sub_(nearest).square_().view(shape), -1, out=error[rows])
    return [error.mul_(scales).mul_(scales) for scales, error in zip(choices, errors, strict=True)]


_EXPONENT = 0x7F800000
_TO_HALF_ULP = 2.0**22 + 1


def _count_steps(magnitudes: Tensor, sums: Tensor, powers: Tensor) -> Tensor:
    """Round magnitudes to E2M1's, as if these went on beyond 6 (8 and more): the result is `sums - _TO_HALF_ULP *
    powers`, exactly. Returns sums; all are FP32 of one size.

    To each, 2^22 times its power of two is added, which is one of E2M1's, 1 to 4: the sum's last bit is worth a step of
    E2M1 there, and the FPU rounds to it, ties to even. So the sum's low bits count steps; from 2 on, as the power is
    added once more.
    """
    torch.bitwise_and(magnitudes.view(torch.int32), _EXPONENT, out=powers.view(torch.int32))
    return torch.add(magnitudes, powers.clamp_(1, 4), alpha=_TO_HALF_ULP, out=sums)


def _to_e2m1(values: Tensor, powers: Tensor) -> Tensor:
    """E2M1 codes without signs, uint8, of FP32 values; both tensors are overwritten. Each power of two above 1 has two
    codes more below it than steps of its own; the 2 that are counted too much, and twice 127, are together 0 modulo
    8."""
    counts = _count_steps(values.abs_().clamp_(max=6), values, powers).view(torch.int32)
    return counts.add_(powers.view(torch.int32).bitwise_right_shift_(22)).to(torch.uint8).bitwise_and_(7)


def to_e2m1_or_less(magnitudes: Tensor) -> Tensor:
    """E2M1 codes, uint8, of FP32 magnitudes, which are overwritten; of two numbers that are as near, the smaller one.

    Steps of E2M1 are half a power of two, 1 to 4, so `magnitude / power * 2` counts them, exactly; codes are counted
    as in `_to_e2m1`.
    """
    powers = (magnitudes.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(1, 4)
    steps = magnitudes.clamp_(max=6).div_(powers).mul_(2).sub_(0.5).ceil_().to(torch.int32)
    return steps.add_(powers.view(torch.int32).bitwise_right_shift_(22)).add_(2).to(torch.uint8).bitwise_and_(7)


def _signs(values: Tensor) -> Tensor:
    """The sign bits of floating-point values as E2M1 codes have them: uint8, 8 for a minus."""
    bits = values.view(INTEGERS[values.dtype.itemsize].torch)
    return bits.bitwise_right_shift(8 * values.dtype.itemsize - 4).to(torch.uint8).bitwise_and_(8)


def _to_int4(values: Tensor) -> Tensor:
    """Codes, uint8, of FP32 values, which are overwritten. Where the last bit of a sum is worth 1, the FPU rounds."""
    return values.clamp_(-8, 7).add_(1.5 * 2.0**23 + 8).view(torch.int32).to(torch.uint8).bitwise_and_(15)


def pack(codes: Tensor) -> Tensor:
    """Bytes `[..., n / 2]` of codes `[..., n]`, 0 to 15, of any integer dtype."""
    pairs = codes.to(torch.uint8).contiguous().view(torch.int16)
    return pairs.bitwise_right_shift(4).bitwise_or_(pairs).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Codes `[..., 2 * n]`, uint8, of bytes `[..., n]`."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """Codes of 1 to 8 bits, uint8 `[rows, bytes * 8 / bits]`, of bytes `[rows, bytes]`: the first in the lowest bits,
    and several bytes with their first one lowest."""
    if bits == 8:
        return packed
    if bits == 4:
        return unpack(packed)
    size, count = _run_of(bits)
    runs = packed.view(len(packed), -1, size).to(torch.int32 if size < 4 else torch.int64)
    words = runs[..., 0]
    for place in range(1, size):
        words = words | runs[..., place] << 8 * place
    codes = torch.empty(*words.shape, count, dtype=torch.uint8)
    for place in range(count):
        codes[..., place] = words >> bits * place & (1 << bits) - 1
    return codes.flatten(1)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """The inverse of `unpack_bits`: bytes `[rows, n * bits / 8]` of codes `[rows, n]`, uint8."""
    if bits == 8:
        return codes
    if bits == 4:
        return pack(codes)
    size, count = _run_of(bits)
    runs = codes.view(len(codes), -1, count).long()
    words = runs[..., 0]
    for place in range(1, count):
        words = words | runs[..., place] << bits * place
    packed = torch.empty(*words.shape, size, dtype=torch.uint8)
    for place in range(size):
        packed[..., place] = words >> 8 * place & 255
    return packed.flatten(1)


def _run_of(bits: int) -> tuple[int, int]:
    """The fewest bytes that have whole codes, and how many."""
    return bits // gcd(bits, 8), 8 // gcd(bits, 8)


def numbers_in_bytes(bits: int, numbers: Sequence[float]) -> Tensor:
    """For each byte, the numbers of its codes of 2 or 4 bits in FP32, the first in the lowest bits, bit-cast to one
    number of 16 or 8 bytes, which an index_select copies at once. `numbers` are those of all codes."""
    codes = unpack_bits(torch.arange(256, dtype=torch.uint8).unsqueeze(1), bits)
    return (
        torch.tensor(numbers, dtype=torch.float32)[codes.int()]
        .view({2: torch.complex128, 4: torch.float64}[bits])
        .squeeze(1)
    )


def laid_out(words: Tensor) -> Tensor:
    """A copy with the strides that its shape has by default. `contiguous` keeps other strides in dimensions of size
    1."""
    return torch.empty(words.shape, dtype=words.dtype).copy_(words)


@functools.cache
def _pairs(element: Element, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # the cached tensor must also work outside inference mode
        return numbers_in_bytes(4, CODE_VALUES[element]).to(device)
