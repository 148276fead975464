"""The cast of TE's NVFP4BlockScaling: E2M1 codes, an E4M3 scale for each block, and an FP32 scale for the tensor.

Operation by operation that of TE's reference (pytorch/custom_recipes/reference_nvfp4.py, NVFP4QuantizerRef), of which
TE's own tests ask its kernels for the same bits. Exports have ModelOpt's order of operations, which rounds otherwise
(`codes.group_scales.nvfp4_scales`).
"""

import torch
from torch import Tensor

from precisionctl.codes.elements import E2M1, E4M3
from precisionctl.codes.group_scales import NVFP4_GROUP, NVFP4_LARGEST
from precisionctl.codes.numerics import quotient

_FP32_MAX = torch.finfo(torch.float32).max
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""TE's, the same in every tensor and step (nvfp4_tensor.py, get_wgrad_sign_vector)."""


def quantize(
    values: Tensor, block: tuple[int, int], generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The E2M1 codes of `values` `[rows, columns]` in blocks of `block` (rows, columns), as numbers in E4M3, which has
    them all; the E4M3 scale_inv of each block, `[down, across]`; and the amax of the whole tensor, FP32 `[]`, of which
    1 / 2688 is the second factor of what a code is multiplied by.

    Codes are `[down * block[0], across * block[1]]`: values are padded with zeros to whole blocks. They are rounded to
    the nearest number, of two to the one with the even code; with a `generator`, up or down at random, so that their
    mean is the value.
    """
    high, wide = block
    missing = (0, -values.shape[1] % wide, 0, -values.shape[0] % high)
    filled = torch.nn.functional.pad(values.detach(), missing)
    rows, columns = filled.shape
    blocks = filled.reshape(rows // high, high, columns // wide, wide)
    amaxes = blocks.abs().amax((1, 3)).float()
    amax = amaxes.amax() if amaxes.numel() else amaxes.new_zeros(())
    to_all = quotient(NVFP4_LARGEST, amax).clamp(max=_FP32_MAX)
    to_all = torch.where(to_all == 0, 1.0, to_all)  # of an infinite amax
    sixth = amax.new_tensor(E2M1.largest).reciprocal()
    scale_inv = (amaxes * (to_all * sixth)).clamp(max=E4M3.largest).to(torch.float8_e4m3fn)
    scale = (scale_inv.float() * to_all.reciprocal()).reciprocal().clamp(max=_FP32_MAX)
    scaled = (blocks * scale[:, None, :, None]).clamp_(-E2M1.largest, E2M1.largest).view(rows, columns)
    return _round(scaled, generator).to(torch.float8_e4m3fn), scale_inv, amax


def _round(scaled: Tensor, generator: torch.Generator | None) -> Tensor:
    """Round FP32 values from -6 to 6, in place, to numbers of E2M1, whose steps are 0.5 up to 2, 1 up to 4, then 2."""
    magnitude = scaled.abs()
    wider, widest = magnitude >= 2, magnitude >= 4
    # Not by `torch.where`, which takes longer than all else where its condition is nearly random
    step = magnitude.copy_(wider).add_(widest, alpha=2).add_(1).mul_(0.5)
    scaled.div_(step)
    if generator is None:
        scaled.round_()  # half to even: a number of steps is even where its code is
    else:
        drawn = torch.rand(scaled.shape, generator=generator, device=scaled.device)
        whole = scaled.floor()
        # Not by adding the draw, which FP32 may round up to the next number of steps
        scaled.sub_(whole).gt_(drawn).add_(whole)
    return scaled.mul_(step)


def transformed(values: Tensor) -> Tensor:
    """The random Hadamard transform of values `[rows, columns]` along each 16 neighbours of a row, in their dtype; rows
    are padded with zeros to whole groups. It spreads an outlier over its group. As the matrix is orthogonal, products
    that sum over columns are those of the values themselves, if both sides are transformed."""
    filled = torch.nn.functional.pad(values.detach(), (0, -values.shape[1] % NVFP4_GROUP)).contiguous()
    matrix = torch.ones(1, 1, device=values.device)
    while len(matrix) < NVFP4_GROUP:  # Sylvester's construction
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix = matrix.new_tensor(_SIGNS)[:, None] * matrix / NVFP4_GROUP**0.5
    made: Tensor = filled.view(-1, NVFP4_GROUP).float() @ matrix
    return made.to(values.dtype).view(filled.shape)
