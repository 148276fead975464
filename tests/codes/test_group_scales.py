"""The scales of four-bit groups against slow definitions, and what they must never be."""

import math

import numpy as np
import pytest
import torch
from soaking import in_soak
from torch import Tensor

from precisionctl.codes import group_scales, nibbles, numerics
from precisionctl.codes.elements import E2M1, INT4, Element
from precisionctl.codes.encoding import GlobalScale

EVERY_BF16 = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
"""By code."""
SCRATCH = torch.empty(nibbles.SCRATCH)


def to_e4m3(value: np.float32) -> float:
    """The nearest, of two the even one, at least 2^-9 and at most 448."""
    after = int(np.searchsorted(E4M3, float(value)).clip(1, 126))
    low, high = E4M3[after - 1], E4M3[after]
    nearer = min((abs(float(value) - low), (after - 1) % 2, low), (abs(float(value) - high), after % 2, high))[2]
    return max(2.0**-9, float(nearer))


def weights(kind: str, columns: int = 512) -> Tensor:
    torch.manual_seed(0)
    made = torch.randn(64, columns) if kind == "gauss" else torch.distributions.StudentT(4.0).sample((64, columns))
    return (0.02 * made).bfloat16()


def amax_of(values: Tensor, group: int) -> Tensor:
    return numerics.row_amax(values.reshape(-1, group), torch.empty(numerics.PIECE)).view(len(values), -1)


def sqnr(values: Tensor, element: Element, scales: Tensor) -> float:
    packed, back = torch.empty(len(values), values.shape[1] // 2, dtype=torch.uint8), torch.empty(values.shape)
    nibbles.encode(values, element, scales, packed, SCRATCH)
    nibbles.decode(packed, element, scales, back, SCRATCH)
    power, error = values.double().square().sum(), (back.double() - values.double()).square().sum()
    return 10 * math.log10(power / error)


@pytest.mark.parametrize("divisor", [False, True])
@pytest.mark.parametrize("largest", [0.0, 1e-44, 1e-30, 3.0e38, *in_soak(0.031, 1.0)])
def test_scales_of_nvfp4_are_the_definition_for_every_amax_of_a_group(largest: float, divisor: bool) -> None:
    """FP32 operation by FP32 operation; the largest block of a tensor has the scale 448, and none has 0."""
    tensor = np.float32(largest)
    smallest = np.float32(2.0**-126 * 2688)
    whole = np.float32(2688) if tensor == 0 else max(tensor, smallest)
    expected_global = np.float32(2688) / whole if divisor else whole / np.float32(2688)
    found = group_scales.nvfp4_global(torch.tensor(largest), divisor=divisor)
    assert found.dtype == torch.float32 and found.item() == expected_global > 0 and found.isfinite()
    amax = EVERY_BF16[EVERY_BF16 <= tensor]
    scales = group_scales.nvfp4_scales(amax.view(1, -1), found, divisor=divisor)
    numbers = amax.numpy()
    with np.errstate(under="ignore"):
        six = np.float32(6)
        wanted = numbers / six * expected_global if divisor else numbers / (six * expected_global)
    expected = [1.0 if number == 0 else to_e4m3(want) for number, want in zip(numbers, wanted, strict=True)]
    assert scales.float().view(-1).tolist() == expected and min(expected) > 0
    multipliers = GlobalScale(found, divisor).times(scales)
    assert bool(multipliers.isfinite().all()) and float(multipliers.min()) > 0


@pytest.mark.parametrize("divisor", [False, True])
def test_scales_of_nvfp4_on_a_tie_of_e4m3_are_rounded_from_the_quotient_in_fp32(divisor: bool) -> None:
    """Where another order of the same operations would give the code beside it."""
    torch.manual_seed(0)
    amax = torch.rand(4000) + 0.5
    ties = torch.from_numpy((E4M3[8:126] + E4M3[9:127]) / 2).float()[torch.randint(118, (4000,))]
    wholes = ties * 6 / amax if divisor else amax / (6 * ties)
    found = group_scales.nvfp4_scales(amax, wholes, divisor=divisor).float().tolist()
    six = np.float32(6)
    pairs = zip(amax.numpy(), wholes.numpy(), strict=True)
    wanted = [a / six * whole if divisor else a / (six * whole) for a, whole in pairs]
    assert found == [to_e4m3(want) for want in wanted]


def test_the_group_with_the_largest_magnitude_of_a_tensor_has_the_largest_scale() -> None:
    amax = torch.rand(1000) * 3 + 1e-3
    for divisor in (False, True):
        whole = group_scales.nvfp4_global(amax, divisor=divisor)
        assert set(group_scales.nvfp4_scales(amax, whole, divisor=divisor).float().tolist()) == {448.0}


def test_exponents_of_mxfp4_are_the_definition_for_every_amax() -> None:
    """2^(e - 2), one more where the mantissa is at least 1.75: where the next number of E2M1, 8, would be nearer. What
    6 would stand for must be finite: the very largest are clamped."""
    amax = torch.cat([EVERY_BF16, torch.nextafter(EVERY_BF16[1:], torch.tensor(0.0))])
    for number, stored in zip(amax.tolist(), group_scales.mxfp4_scales(amax).view(torch.uint8).tolist(), strict=True):
        mantissa, exponent = math.frexp(number)  # of 1/2 to 1
        expected = 127 + exponent - 1 - 2 + (mantissa >= 1.75 / 2) if number else 0
        assert stored == min(max(0, expected), 252)


def test_what_mxfp4_clamps_to_6_is_nearer_to_6_than_to_8() -> None:
    amax = EVERY_BF16[(EVERY_BF16 > 2.0**-120) & (EVERY_BF16 < 2.0**127)].double()
    quotient = amax / group_scales.mxfp4_scales(amax).double()
    assert float(quotient.max()) < 7 and float(quotient.min()) >= 3.5


def test_scales_of_int4_are_half_of_the_steps_in_bf16_for_every_amax() -> None:
    scales = group_scales.int4_scales(EVERY_BF16)
    assert scales.dtype == torch.bfloat16 and bool((scales > 0).all())
    expected = (EVERY_BF16.double() / 7.5).float().bfloat16()
    assert torch.equal(scales, torch.where(expected > 0, expected, 1.0))
    assert float(scales[0]) == 1 and scales[-1].isfinite()


@pytest.mark.parametrize("kind", ["gauss", "student"])
def test_which_rule_loses_least(kind: str) -> None:
    """MXFP4's beside that of OCP and of ModelOpt; a search pays for NVFP4 and INT4."""
    values = weights(kind)
    amax = amax_of(values, 32)
    ocp, ceiling = torch.exp2(torch.floor(torch.log2(amax)) - 2), torch.exp2(torch.ceil(torch.log2(amax / 6)))
    ours = sqnr(values, E2M1, group_scales.mxfp4_scales(amax).float())
    assert sqnr(values, E2M1, ceiling) + 0.3 < ours > sqnr(values, E2M1, ocp) + 0.1
    amax = amax_of(values, 16)
    whole = group_scales.nvfp4_global(amax.amax(), divisor=False)
    by_amax = group_scales.nvfp4_scales(amax, whole, divisor=False)
    searched = group_scales.nvfp4_scales_of(values, amax, whole, SCRATCH, divisor=False)
    gain = sqnr(values, E2M1, searched.float() * whole) - sqnr(values, E2M1, by_amax.float() * whole)
    assert 0.4 < gain < 1
    for group, least in ((32, 0.4), (128, 0.6)):
        amax = amax_of(values, group)
        by_amax, searched = group_scales.int4_scales(amax), group_scales.int4_scales_of(values, amax, SCRATCH)
        gain = sqnr(values, INT4, searched.float()) - sqnr(values, INT4, by_amax.float())
        assert least < gain < 1.2


def test_a_search_takes_the_candidate_of_the_least_squared_error_and_the_first_of_equals() -> None:
    values = weights("student", 64)
    amax = amax_of(values, 32)
    candidates = [group_scales.int4_scales(amax * part) for part in (1.0, 0.5, 1.0, 0.8)]
    found = group_scales.least_error(values, INT4, candidates, Tensor.float, SCRATCH)
    groups = values.double().view(64, 2, 32)
    errors = []
    for candidate in candidates:
        scale = candidate.double().unsqueeze(-1)
        errors.append((((groups.float() / scale.float()).round().clamp(-8, 7) * scale - groups) ** 2).sum(-1))
    chosen = torch.stack(errors).argmin(0)
    assert set(chosen.flatten().tolist()) >= {0, 3}
    assert torch.equal(found, torch.stack(candidates).gather(0, chosen.unsqueeze(0))[0])
    halfway = torch.full((1, 32), 1.25)  # 1 and 1.5 are as far away
    for pair in ([1.0, 1.5], [1.5, 1.0]):
        equals = [torch.tensor([[number]], dtype=torch.bfloat16) for number in pair]
        assert group_scales.least_error(halfway, INT4, equals, Tensor.float, SCRATCH).item() == pair[0]
    zeros = torch.zeros(2, 32)
    assert group_scales.int4_scales_of(zeros, amax_of(zeros, 32), SCRATCH).tolist() == [[1.0], [1.0]]
