"""The scales of four-bit groups: what NVFP4, MXFP4 and INT4 store for the largest magnitude of each group.

An amax is FP32 `[rows, groups]`, finite. No scale is zero, so that codes can always be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from precisionctl.codes import nibbles
from precisionctl.codes.elements import E2M1, E4M3, INT4, Element
from precisionctl.codes.encoding import GlobalScale
from precisionctl.codes.numerics import INTEGERS
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

NVFP4_GROUP, MXFP4_GROUP, INT4_GROUP = 16, 32, 128
"""Inputs that share a scale; INT4's as in the preset W4A16, others have 32 or 64."""

NVFP4_LARGEST = E2M1.largest * E4M3.largest
"""What amax of a tensor becomes under its global scale, 2688: the largest code times the largest scale of a group."""

_SMALLEST_E4M3 = 2.0**-9
_SMALLEST_NORMAL = 2.0**-126


def nvfp4_global(amax: Tensor, *, divisor: bool) -> Tensor:
    """The scale of a whole tensor, or of those that share it, FP32: the multiplier `amax / 2688` of ModelOpt and
    Transformer Engine, or compressed-tensors' divisor `2688 / amax`; 1 for a tensor of zeros. One of the two is not
    the other's reciprocal, to the bit, so the one that is stored decides of everything."""
    largest = torch.full_like(amax, NVFP4_LARGEST, dtype=torch.float32)
    usable = torch.where(amax > 0, amax.float().clamp(min=_SMALLEST_NORMAL * NVFP4_LARGEST), largest)
    return largest / usable if divisor else usable / largest


def nvfp4_scales(amax: Tensor, global_scale: Tensor, *, divisor: bool, largest: float = E2M1.largest) -> Tensor:
    """What is stored for each group, E4M3: `amax / (6 * global)`, or for a divisor `amax / 6 * global`, rounded to
    E4M3 and at least 2^-9; 1 for zeros. FP32 throughout, as ModelOpt computes it (nvfp4_tensor.py,
    get_weights_scaling_factor); `nvfp4_scaling` has another order of operations, TE's, which rounds otherwise.
    `largest` in place of 6 is the number that amax is to become."""
    wanted = amax / largest * global_scale if divisor else amax / (largest * global_scale)
    stored = wanted.clamp(_SMALLEST_E4M3, E4M3.largest)
    return torch.where(amax > 0, stored, 1.0).to(torch.float8_e4m3fn)


def mxfp4_scales(amax: Tensor) -> Tensor:
    """What is stored for each group, E8M0: 2^(e - 2) for an amax of 2^e * m, and 2^(e - 1) from m = 1.75 on, where amax
    / 2^(e - 2) is 7 or more, and so nearer to 8 than to 6 (compressed-tensors, `round_to_power_2`).

    So only values below 7 are clamped to 6. OCP's own rule (MX 1.0, 6.3) also clamps those up to 8; ModelOpt's, the
    smallest power of two for which nothing exceeds 6, has coarser steps in a third of all groups. Of Gaussian weights
    this rule gives 19.0 dB, OCP's 18.9, ModelOpt's 18.5, and the better one of two exponents for each group, by squared
    error, 19.1: so there is no search.
    """
    exponent = (amax.float().view(torch.int32) + (1 << 21)) >> 23
    finite = (exponent - 2).clamp(0, 252)  # under 253, 6 is infinite in FP32
    return finite.to(torch.uint8).view(torch.float8_e8m0fnu)


def int4_scales(amax: Tensor) -> Tensor:
    """What is stored for each group of symmetric INT4, BF16: `amax / 7.5`, half the steps from -8 to 7
    (compressed-tensors, `calculate_qparams`); 1 for zeros."""
    stored = (amax / torch.full_like(amax, 7.5)).bfloat16()
    return torch.where(stored > 0, stored, 1.0)


def least_error(
    values: Tensor,
    element: Element,
    candidates: Sequence[Tensor],
    multipliers: Callable[[Tensor], Tensor],
    scratch: Tensor,
) -> Tensor:
    """For each group of `values` `[rows, columns]`, the one of several candidate scales with the smallest squared
    error. Candidates are `[rows, groups]`, in the dtype that is stored. `multipliers` maps them to the FP32 multipliers
    of codes; `scratch` is as `nibbles.encode` takes it.

    A later candidate must be better by a thousandth than the best before it, since the last bits of a sum depend on the
    machine.
    """
    errors = nibbles.squared_errors(values, element, [multipliers(stored) for stored in candidates], scratch)
    best, least = candidates[0], errors[0]
    for stored, error in zip(candidates[1:], errors[1:], strict=True):
        better = error < least * (1 - 2.0**-10)
        best, least = _chosen(better, stored, best), _chosen(better, error, least)
    return best


def _chosen(where: Tensor, there: Tensor, elsewhere: Tensor) -> Tensor:
    """`torch.where`, computed by bit operations. It is ten times as fast where the condition is nearly random, as it
    has no branches to mispredict."""
    dtype = INTEGERS[there.dtype.itemsize].torch
    bits, others = there.view(dtype), elsewhere.view(dtype)
    return (others ^ ((others ^ bits) & -where.to(dtype))).view(there.dtype)


def nvfp4_scales_of(values: Tensor, amax: Tensor, global_scale: Tensor, scratch: Tensor, *, divisor: bool) -> Tensor:
    """`nvfp4_scales`, or those that bring amax to 4 instead of 6 where less is lost by it ("four over six"): the steps
    between 4 and 6 are the coarsest. 0.4 to 0.8 dB more, of Gaussian weights 21.2 in place of 20.4."""
    candidates = [nvfp4_scales(amax, global_scale, divisor=divisor, largest=number) for number in (6.0, 4.0)]
    return least_error(values, E2M1, candidates, GlobalScale(global_scale, divisor).times, scratch)


def int4_scales_of(values: Tensor, amax: Tensor, scratch: Tensor) -> Tensor:
    """`int4_scales`, or those of 0.9 or 0.8 of amax where less is lost by clamping the largest: 0.5 dB more in groups
    of 32 and 0.7 in groups of 128."""
    candidates = [int4_scales(amax * part) for part in (1.0, 0.9, 0.8)]
    return least_error(values, INT4, candidates, torch.Tensor.float, scratch)
