"""The cast to NVFP4 in training against Transformer Engine's own reference (tests/golden/nvfp4.py), bit for bit, and
what that reference has not: rounding at random."""

import math
from itertools import pairwise

import pytest
import torch
from nvfp4_golden import GOLDEN, NAMES, unpacked
from torch import Tensor

from precisionctl.codes import nvfp4_scaling

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.mark.parametrize("copy", ["rows", "columns"])
@pytest.mark.parametrize("name", NAMES)
def test_codes_and_both_scales_are_those_of_te_s_reference(name: str, copy: str) -> None:
    values, block = GOLDEN[name], (16, 16) if name == "weight" else (1, 16)
    if copy == "columns":
        values = values.t() if name == "weight" else nvfp4_scaling.transformed(values.t())
    codes, scale_inv, amax = nvfp4_scaling.quantize(values, block)
    expected = {part: GOLDEN[f"{name}.{copy}.{part}"] for part in ("codes", "scale_inv", "amax")}
    assert amax == expected["amax"]
    assert torch.equal(scale_inv.repeat_interleave(block[0], 0).float(), expected["scale_inv"].float())
    assert torch.equal(codes.float(), unpacked(expected["codes"]))


def test_the_golden_file_holds_what_may_go_wrong() -> None:
    scales = torch.cat([GOLDEN[f"{name}.rows.scale_inv"].float().flatten() for name in NAMES])
    assert 0 in scales and 448 in scales and ((scales > 0) & (scales < 2**-6)).any(), "E4M3's ends"
    assert {*unpacked(GOLDEN["ties.rows.codes"]).abs().flatten().tolist()} == {*E2M1}
    assert not torch.equal(GOLDEN["input.rows.amax"], GOLDEN["input.columns.amax"])
    assert GOLDEN["FP32"].dtype == torch.float32


def test_products_of_transformed_values_are_those_of_the_values() -> None:
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(rows, 96, generator=random) for rows in (5, 7))
    made = nvfp4_scaling.transformed(left) @ nvfp4_scaling.transformed(right).t()
    torch.testing.assert_close(made, left @ right.t())
    alone = torch.zeros(1, 40)
    alone[0, 33] = 8.0
    assert nvfp4_scaling.transformed(alone).abs().tolist() == [[0.0] * 32 + [2.0] * 16], "padded to whole groups"


def dequantized(values: Tensor, generator: torch.Generator | None) -> Tensor:
    codes, scale_inv, amax = nvfp4_scaling.quantize(values, (1, 16), generator)
    return codes.double() * scale_inv.double().repeat_interleave(16, 1) * (amax.double() / 2688)


def test_rounding_at_random_gives_a_neighbour_and_in_the_mean_the_value() -> None:
    """Of n draws the mean is within 6 standard errors, each at most half a step by the root of n. A value that its E4M3
    scale has brought beyond 6 is 6 in any draw."""
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = values.double()
    _, scale_inv, amax = nvfp4_scaling.quantize(values, (1, 16))
    unit = scale_inv.double().repeat_interleave(16, 1) * (amax.double() / 2688)
    scaled = (exact / unit).clamp(-6, 6)
    grid = torch.tensor(sorted({*E2M1, *(-each for each in E2M1)}), dtype=torch.float64)
    above = torch.searchsorted(grid, scaled.contiguous()).clamp(max=len(grid) - 1)
    high, low = grid[above], grid[(above - 1).clamp(min=0)]
    generator, draws = torch.Generator().manual_seed(2), 2000
    total = torch.zeros_like(exact)
    for _ in range(draws):
        drawn = dequantized(values, generator) / unit
        # a number that is on the grid, but for the last bits of its scale, may have drawn either neighbour
        assert (((drawn - high).abs() < 1e-6) | ((drawn - low).abs() < 1e-6) | ((drawn - scaled).abs() < 1e-6)).all()
        total += drawn
    error = (total / draws - scaled).abs()
    assert (error <= 6 * (high - low) / 2 / math.sqrt(draws) + 1e-6).all()
    nearest = (dequantized(values, None) / unit - scaled).abs()
    assert nearest.mean() > 4 * error.mean(), "rounding to nearest is off by more"


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-23, 1 - 2**-24])
def test_no_draw_moves_a_value_that_e2m1_has_and_none_leads_beyond_6(
    draw: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last two are the largest that torch.rand gives: added to 3 steps of 2, FP32 has no number below 4 for them.
    Between the numbers of E2M1, 0 leads to the upper neighbour and they to the lower one, as the share is 1/2."""
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, draw))
    exact = [sign * each for each in E2M1 for sign in (1, -1)]  # with 6 in it, all of them are as their scale has them
    between = [(low + high) / 2 for low, high in pairwise(sorted({*exact}))]
    values = torch.tensor([exact, [*between, 6.0, -6.0]])
    codes, scale_inv, _ = nvfp4_scaling.quantize(values, (1, 16), torch.Generator())
    assert (scale_inv.float() == 448).all(), "the largest scale, by which 6 stays 6"
    assert codes[0].tolist() == exact
    neighbours = sorted({*exact})
    assert codes[1].tolist() == [*(neighbours[:-1] if draw else neighbours[1:]), 6.0, -6.0]


def test_a_tensor_of_zeros_or_of_nothing_stays_that_and_no_number_is_lost_in_silence() -> None:
    codes, _, amax = nvfp4_scaling.quantize(torch.zeros(3, 20).bfloat16(), (1, 16))
    assert codes.shape == (3, 32) and amax == 0 and not codes.float().any()
    codes, scale_inv, _ = nvfp4_scaling.quantize(torch.zeros(0, 32), (1, 16))
    assert codes.shape == (0, 32) and scale_inv.shape == (0, 2)
    for number in (math.nan, math.inf):
        values = torch.ones(1, 16)
        values[0, 3] = number
        _, _, amax = nvfp4_scaling.quantize(values, (1, 16))
        assert not amax.isfinite(), "so neither is the product, and the update is skipped"
