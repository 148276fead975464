"""Four-bit codes, E2M1 and INT4: two in a byte, the earlier one in its low half; what they are, and those of values.

Eight in an int32, the first in its lowest bits, are the same bytes in memory: `words.view(torch.uint8)`. Sources: OCP
Microscaling Formats (MX) 1.0, section 5.3.3, for E2M1; compressed-tensors' `pack_to_int32` for INT4, a number + 8.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from precisionctl.fp8.numerics import PIECE

NibbleFormat = Literal["E2M1", "INT4"]
"""What a code of four bits stands for."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS: Mapping[NibbleFormat, tuple[float, ...]] = {
    "E2M1": (*_E2M1, *(-number for number in _E2M1)),
    "INT4": tuple(float(number) for number in range(-8, 8)),
}
"""The number of each code. E2M1 has a negative zero, code 8."""

SCRATCH = 3 * PIECE
"""Elements of FP32 to work in: to encode E2M1 takes three buffers, and twenty calls of PyTorch for each piece."""


def decode(packed: Tensor, form: NibbleFormat, scales: Tensor, values: Tensor, scratch: Tensor) -> None:
    """`number * scale`, in FP32, into `values`, FP32 `[rows, columns]`, contiguous.

    `packed` is uint8 `[rows, bytes]`, where the last bytes of a row may be filling; `scales` FP32 `[rows, groups]`, for
    groups of equal size, so `[rows, columns]` is one for each element; `scratch` FP32 of any size, best SCRATCH.
    """
    decode_asymmetric(packed, form, scales, None, values, scratch)


def decode_asymmetric(
    packed: Tensor, form: NibbleFormat, scales: Tensor, zeros: Tensor | None, values: Tensor, scratch: Tensor
) -> None:
    """`decode` of `(number - zero) * scale`; `zeros` are numbers of the format, FP32, of `scales`' shape."""
    if 2 * packed.shape[1] != values.shape[1]:  # the last bytes of rows are filling
        filled = torch.empty(len(packed), 2 * packed.shape[1], device=values.device)
        decode(packed, form, filled.new_ones(1, 1).expand(len(packed), 1), filled, scratch)
        values.copy_(filled[:, : values.shape[1]])
    for rows, (work,) in _bands(values, scratch, 1):
        into, by = values[rows], scales[rows].unsqueeze(-1)
        if 2 * packed.shape[1] == values.shape[1]:
            index = work.view(torch.int32)[: packed[rows].numel()].copy_(packed[rows].reshape(-1))
            torch.index_select(_pairs(form, values.device), 0, index, out=into.view(-1).view(torch.float64))
        groups = into.view(*scales[rows].shape, -1)
        if zeros is not None:
            groups.sub_(zeros[rows].unsqueeze(-1))
        groups.mul_(by)


def encode(values: Tensor, form: NibbleFormat, scales: Tensor, packed: Tensor, scratch: Tensor) -> None:
    """The codes of the numbers nearest to `values / scale`, divided in FP32, into `packed`; of two that are as near,
    the even one. What is beyond the largest number becomes it.

    Shapes are those of `decode`; filling becomes the code of zero. A zero of E2M1 keeps the sign of its value, as
    compressed-tensors' does, so that codes decoded to BF16 and encoded again are the same. There is no code for NaN:
    it gives an arbitrary one.
    """
    encode_asymmetric(values, form, scales, None, packed, scratch)


def encode_asymmetric(
    values: Tensor, form: NibbleFormat, scales: Tensor, zeros: Tensor | None, packed: Tensor, scratch: Tensor
) -> None:
    """`encode` of `values / scale + zero`; `zeros` as `decode_asymmetric` takes them."""
    filling = 2 * packed.shape[1] - values.shape[1]
    for rows, (numbers, *others) in _bands(values, scratch, _BUFFERS[form]):
        size = values[rows].numel()
        numbers[:size].view(values[rows].shape).copy_(values[rows])
        groups = numbers[:size].view(*scales[rows].shape, -1).div_(scales[rows].unsqueeze(-1))
        if zeros is not None:
            groups.add_(zeros[rows].unsqueeze(-1))
        codes = _ROUND[form](numbers[:size], *(buffer[:size] for buffer in others)).view(values[rows].shape)
        packed[rows] = pack(F.pad(codes, (0, filling), value=NUMBERS[form].index(0.0)) if filling else codes)


def _bands(values: Tensor, scratch: Tensor, buffers: int) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Rows, and so many FP32 buffers that each have room for them; scratch that is too small for one row is not
    used."""
    rows, columns = values.shape
    room = scratch.numel() // buffers
    work = scratch[: room * buffers] if room >= columns else scratch.new_empty(buffers * columns)
    step = max(1, work.numel() // buffers // max(1, columns))
    for row in range(0, rows, step):
        yield slice(row, row + step), work.view(buffers, -1).unbind()


def squared_error(values: Tensor, form: NibbleFormat, scales: Tensor, scratch: Tensor) -> Tensor:
    """What `encode` loses of `values` `[rows, columns]` in each group: the sum of the squared differences, FP32
    `[rows, groups]`, of `scales`' shape."""
    error = torch.empty_like(scales)
    for rows, buffers in _bands(values, scratch, 3):
        quotients, nearest, other = (buffer[: values[rows].numel()] for buffer in buffers)
        quotients.view(values[rows].shape).copy_(values[rows])
        groups = quotients.view(*scales[rows].shape, -1).div_(scales[rows].unsqueeze(-1))
        if form == "E2M1":
            _count_steps(quotients, nearest, other).sub_(other)
            quotients.abs_()
        else:
            torch.round(quotients, out=nearest).clamp_(-8, 7)
        quotients.sub_(nearest).square_()
        torch.sum(groups, -1, out=error[rows])
    return error.mul_(scales).mul_(scales)


_ONE, _SIX = 0x3F800000, 0x40C00000  # 1.0 and 6.0 in FP32
_SIGN_OFF, _EXPONENT, _TO_HALF_ULP = 0x7FFFFFFF, 0x7F800000, 22 << 23


def _count_steps(values: Tensor, sums: Tensor, powers: Tensor) -> Tensor:
    """Round FP32 values to magnitudes of E2M1: these are `sums - powers`, two buffers of the same size. Returns sums.

    To a magnitude, the power of two that is 2^22 times its own (at least that of 1) is added: the sum's last bit is
    worth a step of E2M1 there, and the FPU rounds to it, ties to even. So the sum's low bits count steps, from 6 on.
    """
    bits, exponents = sums.view(torch.int32), powers.view(torch.int32)
    torch.bitwise_and(values.view(torch.int32), _SIGN_OFF, out=bits)
    bits.clamp_(max=_SIX)
    torch.bitwise_and(bits, _EXPONENT, out=exponents)
    exponents.clamp_(min=_ONE).add_(_TO_HALF_ULP + 6)
    return sums.add_(powers)


def _to_e2m1(values: Tensor, sums: Tensor, powers: Tensor) -> Tensor:
    """Codes, int32, of FP32 values, which are overwritten; the others are FP32 buffers of the same size. Below a power
    of two above 1 there are two codes more than steps of its own; 6, and 2 * (127 + 22), are together 0 modulo 8."""
    bits, signs = _count_steps(values, sums, powers).view(torch.int32), values.view(torch.int32)
    bits.add_(powers.view(torch.int32).bitwise_right_shift_(22)).bitwise_and_(7)
    return bits.bitwise_or_(signs.bitwise_right_shift_(28).bitwise_and_(8))


def _to_int4(values: Tensor, *unused: Tensor) -> Tensor:
    """Codes, int32, of FP32 values, which are overwritten. Where the last bit of a sum is worth 1, the FPU rounds."""
    return values.clamp_(-8, 7).add_(1.5 * 2.0**23 + 8).view(torch.int32).bitwise_and_(15)


_ROUND: Mapping[NibbleFormat, Callable[..., Tensor]] = {"E2M1": _to_e2m1, "INT4": _to_int4}
_BUFFERS: Mapping[NibbleFormat, int] = {"E2M1": 3, "INT4": 1}


def pack(codes: Tensor) -> Tensor:
    """Bytes `[..., n / 2]` of codes `[..., n]`, 0 to 15, of any integer dtype."""
    pairs = codes.to(torch.uint8).contiguous().view(torch.int16)
    return pairs.bitwise_right_shift(4).bitwise_or_(pairs).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Codes `[..., 2 * n]`, uint8, of bytes `[..., n]`."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


@functools.cache
def _pairs(form: NibbleFormat, device: torch.device) -> Tensor:
    """By byte, its two numbers in FP32, as one FP64 that has them in this order in memory: FP64 is only copied."""
    with torch.inference_mode(False):  # or it would be of no use outside
        numbers = torch.tensor(NUMBERS[form], device=device)
        return numbers[unpack(torch.arange(256, dtype=torch.uint8, device=device)).int()].view(torch.float64)
