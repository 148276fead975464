"""E2M1, the four-bit numbers of MXFP4: two codes to a byte, the first in its low half.

All sixteen are numbers of E4M3 too. So they are read as E4M3 codes, and whatever knows FP8 with a scale for 32 values
knows MXFP4. Source: OCP Microscaling Formats (MX) 1.0, section 5.3.3; its table of E8M0 has what scales are.
"""

import functools

import torch
from torch import Tensor

DTYPE = torch.float4_e2m1fn_x2
"""PyTorch's name for a byte of two codes. It knows no operation on them."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack(pairs: Tensor, codes: Tensor) -> None:
    """The E4M3 `codes` `[rows, columns]`, contiguous, of the numbers that `pairs` hold, uint8 `[rows, columns / 2]`."""
    torch.index_select(_table(), 0, pairs.reshape(-1).int(), out=codes.view(torch.int16).view(-1))


@functools.cache
def _table() -> Tensor:
    """By byte, the two E4M3 codes, as an int16 that has them in this order in memory."""
    with torch.inference_mode(False):  # or it would be of no use outside
        magnitudes = torch.tensor(_MAGNITUDES)
        numbers = torch.cat([magnitudes, -magnitudes]).to(torch.float8_e4m3fn).view(torch.uint8)
        byte = torch.arange(256)
        return torch.stack([numbers[byte % 16], numbers[byte // 16]], 1).contiguous().view(torch.int16).view(-1)
