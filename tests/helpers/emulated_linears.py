"""Linears of the emulated backend, and what their products have to be."""

import torch
from torch import Tensor

from precisionctl.fp8.state import DelayedScaling
from precisionctl.precision import Precision
from precisionctl.trainer.backends.emulated import EmulatedBackend

TOKENS, IN, OUT = 48, 64, 80
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def backend_of(precision: Precision, dtype: torch.dtype = torch.bfloat16) -> EmulatedBackend:
    return EmulatedBackend(precision, dtype, torch.device("cpu"))


def delayed(**fields: object) -> Precision:
    return Precision(fp8=True, delayed=DelayedScaling(**{"amax_history_len": 4, **fields}))


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, requires_grad: bool = False) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_(requires_grad)


def codes(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Code values in float64, cast here in another way than in the code under test."""
    scaled = (values.detach().float() * torch.tensor(scale)).clamp(-LARGEST[dtype], LARGEST[dtype])
    return scaled.to(dtype).double()


def assert_rounded_once(
    actual: Tensor, left: Tensor, right: Tensor, scale_inv: float, bias: Tensor | float = 0
) -> None:
    """`actual` is `left @ right * scale_inv + bias`, accumulated in FP32 and rounded once to its dtype.

    The rounding is half a unit in the last place. The FP32 part is bounded by (terms + 4) * 2**-24 of the sum
    of magnitudes: one error per addition, and one each for the scale_inv's product, its use and the bias.
    """
    exact = left @ right * scale_inv + bias
    magnitude = left.abs() @ right.abs() * scale_inv + torch.as_tensor(bias).abs()
    accumulation = (left.shape[1] + 4) * 2.0**-24 * magnitude
    rounding = torch.finfo(actual.dtype).eps / 2 * (exact.abs() + accumulation)
    assert ((actual.double() - exact).abs() <= accumulation + rounding).all()
