"""What four-bit schemes lose of a weight, against FP64 and against what is known of Gaussian numbers."""

import math

import pytest
import torch
from torch import Tensor

from precisionctl.codes import nibbles, numerics
from precisionctl.codes.elements import E2M1
from precisionctl.codes.four_bit_loss import FORMATS, FourBitScheme, four_bit_losses
from precisionctl.codes.health import measure
from precisionctl.codes.statistics import Loss

SCRATCH = torch.empty(nibbles.SCRATCH)


def losses(values: Tensor) -> dict[FourBitScheme, Loss]:
    return four_bit_losses(values, numerics.amax(values), SCRATCH)


def gauss(*shape: int) -> Tensor:
    return (0.02 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))).bfloat16()


def test_the_losses_of_gaussian_weights_are_in_the_order_that_is_known() -> None:
    """FP8 beside them, some 31 dB; four bits without any scale's error would have 20 to 21."""
    values = gauss(512, 512)
    found = {scheme: loss.sqnr for scheme, loss in losses(values).items()}
    fp8 = measure(values, torch.float8_e4m3fn, None, square=True).losses["current"].sqnr
    assert fp8 > 30 > 21.5 > found["nvfp4"] > 21 > 20 > found["w4a16"] > 19.5 > 19.2 > found["mxfp4"] > 18.8


def test_what_is_a_number_of_the_format_loses_nothing() -> None:
    numbers = torch.tensor(nibbles.CODE_VALUES[E2M1]).repeat(4, 16) / 4
    found = losses(numbers)
    assert found["mxfp4"] == found["nvfp4"] == Loss(1024, 0, 0, found["mxfp4"].power, 0.0)
    assert found["mxfp4"].sqnr == math.inf and found["w4a16"].sqnr < 40


@pytest.mark.parametrize("scheme", FORMATS)
def test_underflows_saturation_and_error_are_counted(scheme: FourBitScheme) -> None:
    element, group = FORMATS[scheme]
    values = torch.zeros(3, 2 * group)
    values[0, :group] = 1.0
    values[0, 1] = 1e-3  # of 1, less than any format's smallest
    values[2, 0] = 2.0**-60
    found = losses(values)[scheme]
    assert found.elements == values.numel() and found.underflows == 1 + (scheme == "nvfp4")
    assert found.power == pytest.approx(group - 1 + 1e-6, rel=1e-6)
    if scheme == "w4a16":  # in both groups the largest is at least 7.5 times the scale
        assert found.saturated == group - 1 + 1 and found.error > 1e-6
    else:
        assert found.saturated == 0 and found.error >= 1e-6


def test_rows_one_after_the_other_lose_what_all_lose_and_columns_may_be_ragged() -> None:
    values = gauss(40, 200)
    amax = numerics.amax(values)
    whole = four_bit_losses(values, amax, SCRATCH)
    for scheme, loss in whole.items():
        parts = sum((four_bit_losses(part, amax, torch.empty(700))[scheme] for part in values.split(7)), Loss())
        assert parts.elements == loss.elements == 8000
        assert (parts.underflows, parts.saturated) == (loss.underflows, loss.saturated)
        assert parts.power == pytest.approx(loss.power) and parts.error == pytest.approx(loss.error)


def test_nan_and_infinities_count_as_zeros() -> None:
    values = gauss(16, 128)
    broken, zeroed = values.clone(), values.clone()
    broken[3, 5], broken[4, 6], broken[5, 7] = math.nan, math.inf, -math.inf
    zeroed[[3, 4, 5], [5, 6, 7]] = 0
    amax = numerics.amax(values)
    assert four_bit_losses(broken, amax, SCRATCH) == four_bit_losses(zeroed, amax, SCRATCH)
