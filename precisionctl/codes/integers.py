"""INT8 codes: the values that they stand for, and the codes of values.

A byte is the number in two's complement, or the number plus 128. Four of the latter in an int32, the first in its
lowest bits, are the same bytes in memory: `words.view(torch.uint8)` (compressed-tensors' `pack_to_int32`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor


def decode(codes: Tensor, scales: Tensor, zeros: Tensor | None, values: Tensor) -> None:
    """`(number - zero) * scale`, in FP32, into `values`, FP32 `[rows, columns]`, contiguous.

    `codes` are int8, or uint8 for the number plus 128, of `values`' shape; `scales` FP32 `[rows, groups]`, for groups
    of equal size; `zeros` numbers of that shape.
    """
    values.copy_(codes)
    groups = values.view(*scales.shape, -1)
    taken = zeros  # from codes, before they are scaled
    if codes.dtype == torch.uint8:
        taken = torch.full_like(scales, 128) if zeros is None else zeros + 128
    if taken is not None:
        groups.sub_(taken.unsqueeze(-1))
    groups.mul_(scales.unsqueeze(-1))


def encode(values: Tensor, scales: Tensor, zeros: Tensor | None, codes: Tensor, scratch: Tensor) -> None:
    """The codes of the numbers nearest to `values / scale + zero`, divided in FP32, into `codes`; of two that are as
    near, the even one. What is beyond -128 or 127 becomes it.

    Shapes are those of `decode`; `scratch` is FP32 of any size, best numerics.PIECE. There is no code for NaN: it gives
    an arbitrary one.
    """
    rows, columns = values.shape
    work = scratch if scratch.numel() >= columns else scratch.new_empty(columns)
    step = work.numel() // max(1, columns)
    for row in range(0, rows, step):
        here = slice(row, row + step)
        quotients = work[: values[here].numel()].view(values[here].shape).copy_(values[here])
        groups = quotients.view(*scales[here].shape, -1).div_(scales[here].unsqueeze(-1))
        if zeros is not None:
            groups.add_(zeros[here].unsqueeze(-1))
        quotients.round_().clamp_(-128, 127)
        codes[here] = quotients.add_(128) if codes.dtype == torch.uint8 else quotients
