"""What each four-bit scheme of `export-inference` would lose of a weight; `health.py` has FP8's scalings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from precisionctl.codes import group_scales, nibbles, numerics
from precisionctl.codes.elements import E2M1, INT4, Element
from precisionctl.codes.encoding import GlobalScale
from precisionctl.codes.nibbles import CODE_VALUES
from precisionctl.codes.statistics import Loss
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

FourBitScheme = Literal["nvfp4", "mxfp4", "w4a16"]
FORMATS: Mapping[FourBitScheme, tuple[Element, int]] = {
    "nvfp4": (E2M1, group_scales.NVFP4_GROUP),
    "mxfp4": (E2M1, group_scales.MXFP4_GROUP),
    "w4a16": (INT4, group_scales.INT4_GROUP),
}
"""The element of its codes, and how many inputs share a scale."""

GAUSSIAN_DB: Mapping[FourBitScheme, float] = {"nvfp4": 21.2, "mxfp4": 19.0, "w4a16": 19.8}
GAUSSIAN_ZEROS: Mapping[FourBitScheme, float] = {"nvfp4": 0.081, "mxfp4": 0.098, "w4a16": 0.134}
"""SQNR of Gaussian weights, and the share of them that become zero: what the steps cost by themselves."""

ZEROS_LIMIT = 3.0
"""More elements that become zero than this many times those of Gaussian weights say that outliers take up the range of
scales. In w4a16, the coarsest, Laplace's distribution has 2.0 times as many, Student's of 3 degrees of freedom 2.5."""
MOST_ZEROS: Mapping[FourBitScheme, float] = {scheme: ZEROS_LIMIT * share for scheme, share in GAUSSIAN_ZEROS.items()}
"""The share of elements that become zero above which it says so."""


def most_zeros(element: Element, block: tuple[int | None, int | None], *, zero_points: bool) -> float | None:
    """The share of elements that become zero above which outliers spoil the scales of these blocks; None if no scheme
    has such. With sixteen numbers many become zero anyway, and it is known of the groups of schemes how many."""
    if zero_points:
        return None
    schemes = (scheme for scheme, (of, group) in FORMATS.items() if (of, (1, group)) == (element, block))
    return next((MOST_ZEROS[scheme] for scheme in schemes), None)


_ROUNDING = 1 + 2.0**-22
"""The relative error of a scale itself. A value that exceeds the largest number by no more than that has not
saturated."""


def four_bit_losses(values: Tensor, amax: Tensor, scratch: Tensor) -> dict[FourBitScheme, Loss]:
    """The losses of rows of a weight, `[n, columns]`, on a CPU. `amax`, FP32 `[]`, is that of the whole weight, or of
    all that share its global scale; `scratch` is as `nibbles.encode` takes it. Losses of rows add up to that of a
    weight. NaN and infinities count as zeros."""
    finite = values.float().nan_to_num(0.0, 0.0, 0.0)
    power = float(finite.double().square().sum())
    losses: dict[FourBitScheme, Loss] = {}
    for scheme, (element, group) in FORMATS.items():
        rows = torch.nn.functional.pad(finite, (0, -values.shape[1] % group))
        largest = numerics.row_amax(rows.view(-1, group), scratch).view(len(rows), -1)
        scales = _scales(scheme, rows, largest, amax.clamp(max=torch.finfo(torch.float32).max), scratch)
        packed = torch.empty(len(rows), rows.shape[1] // 2, dtype=torch.uint8)
        decoded = torch.empty_like(rows)
        nibbles.encode(rows, element, scales, packed, scratch)
        nibbles.decode(packed, element, scales, decoded, scratch)
        limits, groups = scales.unsqueeze(-1) * _ROUNDING, rows.view(*scales.shape, group)
        saturated = (groups > max(CODE_VALUES[element]) * limits) | (groups < min(CODE_VALUES[element]) * limits)
        underflows = (decoded == 0) & (rows != 0)
        error = float((decoded - rows).double().square().sum())
        losses[scheme] = Loss(values.numel(), int(underflows.sum()), int(saturated.sum()), power, error)
    return losses


def _scales(scheme: FourBitScheme, values: Tensor, amax: Tensor, whole: Tensor, scratch: Tensor) -> Tensor:
    """The multipliers of codes that an export in this scheme would choose, FP32 `[rows, groups]`."""
    if scheme == "nvfp4":
        global_scale = group_scales.nvfp4_global(whole, divisor=False)
        stored = group_scales.nvfp4_scales_of(values, amax, global_scale, scratch, divisor=False)
        return GlobalScale(global_scale, divides=False).times(stored)
    if scheme == "mxfp4":
        return group_scales.mxfp4_scales(amax).float()
    return group_scales.int4_scales_of(values, amax, scratch).float()
