"""Statistics of FP8 health against a slow reference, against known distributions, and put together from parts."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from soaking import in_soak

from precisionctl.codes import health, numerics
from precisionctl.codes.health import measure
from precisionctl.codes.statistics import FP8_SCALINGS, ROW_LENGTH, Loss, Statistics

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


REFERENCE = {
    448.0: (0, 127),
    449.0: (-1, 128),
    447.0: (0, 127),
    1.0: (8, 119),
    3.5: (7, 120),
    3.515625: (6, 121),
    0.02: (14, 113),
    0.001: (18, 109),
    1000.0: (-2, 129),
    57344.0: (-7, 134),
    1e30: (-91, 218),
    1e-30: (108, 19),
}
"""By amax: the exponent of the scale of a 128-block, and the E8M0 byte of an MX block's scale_inv."""


def codes_of(dtype):
    """Every finite value of a format, ascending, in FP64."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double().numpy()
    return np.unique(values[np.isfinite(values)])


CODES = {dtype: codes_of(dtype) for dtype in (E4M3, E5M2)}


def nearest(value, dtype):
    """The code nearest to a number, the even one of two; by trying all."""
    codes = CODES[dtype]
    distance = np.abs(codes - np.clip(value, codes[0], codes[-1]))
    best = [code for code in codes[distance == distance.min()]]
    even = [code for code in best if int(torch.tensor(code).to(dtype).view(torch.uint8)) % 2 == 0]
    return even[0] if len(best) == 2 else best[0]


def slow_block_scale(amax):
    """compute_scale_from_amax of TransformerEngine's recipe_common.cuh with force_pow_2_scales, E4M3."""
    if amax == 0 or np.isinf(amax):
        return 1.0
    with np.errstate(over="ignore"):
        scale = np.float32(448) / np.float32(amax)
    return 2.0**127 if np.isinf(scale) else 2.0 ** math.floor(math.log2(scale))


def slow_mx_scale(amax):
    """float_to_e8m0 and exp2f_rcp of TransformerEngine's ptx.cuh after `amax * max_norm_rcp`, E4M3."""
    val = np.float32(amax) * np.float32(1 / 448)
    if np.isinf(val):
        byte = 0xFE
    elif val == 0:
        byte = 0
    else:
        bits = int(val.view(np.uint32))
        byte, mantissa = bits >> 23, bits & 0x7FFFFF
        if (mantissa > 0 and byte != 0xFE) and not (byte == 0 and mantissa <= 0x400000):
            byte += 1
    return 2.0 ** (127 - byte)


def slow_loss(values, scale_of, height, width, dtype):
    """Underflows, saturated and squared error, block after block and element after element."""
    under = over = 0
    error = 0.0
    for top in range(0, values.shape[0], height):
        for left in range(0, values.shape[1], width):
            block = values[top : top + height, left : left + width].reshape(-1)
            numbers = block[~np.isnan(block)]
            scale = scale_of(np.abs(numbers).max() if numbers.size else 0.0)
            for x in block:
                over += bool(np.abs(x) * (1 - 1e-6) > CODES[dtype][-1] / scale)
                if np.isfinite(x):
                    y = nearest(np.float32(x) * np.float32(scale), dtype)
                    under += bool(x != 0 and y == 0)
                    error += (float(np.float32(y) * np.float32(1 / scale)) - x) ** 2
    return under, over, error


def slow_single_scale(scale):
    return lambda amax: float(scale)


def check_against_slow(values, dtype, delayed, square):
    found = measure(values, dtype, delayed, square=square)
    numbers = values.double().numpy()
    current = slow_single_scale(numerics.current_scale(numerics.amax(values), dtype))
    everything = values.shape
    expected = {
        "delayed": slow_loss(numbers, slow_single_scale(delayed), *everything, dtype),
        "current": slow_loss(numbers, current, *everything, dtype),
        "block": slow_loss(numbers, slow_block_scale, 128 if square else 1, 128, E4M3),
        "mxfp8": slow_loss(numbers, slow_mx_scale, 1, 32, E4M3),
    }
    for scaling, (under, over, error) in expected.items():
        loss = found.losses[scaling]
        assert (loss.underflows, loss.saturated) == (under, over), scaling
        assert loss.error == pytest.approx(error, rel=1e-5, abs=1e-45), scaling
        assert loss.elements == values.numel()
    finite = numbers[np.isfinite(numbers)]
    assert found.zeros == (numbers == 0).sum()
    assert found.nonfinite == numbers.size - finite.size
    assert found.sum_2 == pytest.approx((finite**2).sum(), rel=1e-12)
    assert found.sum_4 == pytest.approx((finite**4).sum(), rel=1e-12)
    return found


@pytest.mark.parametrize("shape", [(1, 1), (2, 160), (130, 5), *in_soak(((3, 31),), ((129, 33),))], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("square", [False, True], ids=["rows", "square"])
def test_every_number_is_that_of_a_slow_reference(shape, dtype, square):
    generator = torch.Generator().manual_seed(sum(shape))
    spread = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-30, 10, shape, generator=generator))
    spread[torch.rand(shape, generator=generator) < 0.1] = 0.0
    check_against_slow(spread.bfloat16(), dtype, torch.tensor(37.5), square)


@pytest.mark.parametrize("square", [False, True], ids=["rows", "square"])
@pytest.mark.parametrize(
    "odd",
    [[math.nan], [math.inf, 3.0], [-math.inf, math.nan, 1e-6], [1e-45, 1e-40, 1e-38], [3e38, 1e-30], [0.0], [448.0]],
    ids=str,
)
def test_numbers_at_the_edges_are_counted_as_the_slow_reference_counts_them(odd, square):
    values = torch.linspace(-600, 600, 66).view(2, 33)
    values[1, : len(odd)] = torch.tensor(odd)
    check_against_slow(values, E4M3, torch.tensor(1.0), square)


def test_scales_of_blocks_are_those_that_transformer_engine_s_references_gave():
    """scale_from_amax_tensor (tests/pytorch/references/quantize_scale_calc.py, pow_2_scales) and float_to_e8m0
    (tests/pytorch/test_mxfp8_2d_quantize.py) of TransformerEngine, run once over these amaxes."""
    amaxes = torch.tensor(list(REFERENCE))
    block = numerics.block_scale(amaxes, E4M3)
    mx = numerics.mx_scale(amaxes, E4M3)
    assert [(math.log2(a), 127 - math.log2(b)) for a, b in zip(block, mx, strict=True)] == list(REFERENCE.values())


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_kurtosis_is_3_for_a_gaussian_1_for_signs_and_9_fifths_for_a_uniform():
    normal = measure(gaussian(512, 1024), E4M3, None)
    assert normal.kurtosis == pytest.approx(3.0, abs=6 * math.sqrt(24 / normal.elements))  # its standard error
    assert measure(gaussian(64, 64).sign(), E4M3, None).kurtosis == 1.0
    uniform = torch.rand(512, 1024, generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert measure(uniform, E4M3, None).kurtosis == pytest.approx(1.8, abs=0.02)
    assert math.isnan(measure(torch.zeros(4, 4), E4M3, None).kurtosis)


def test_a_planted_outlier_adds_what_the_formula_says_to_kurtosis():
    values = gaussian(64, 64).double()
    n, s2, s4 = values.numel(), float((values**2).sum()), float((values**4).sum())
    values[3, 3] = 1000.0
    found = measure(values, E4M3, None)
    assert found.kurtosis == pytest.approx(n * (s4 + 1e12) / (s2 + 1e6) ** 2, rel=1e-3)
    assert found.amax == 1000.0


def test_an_outlier_channel_starves_one_scale_for_all_and_leaves_blocks_alone():
    """E4M3 reaches from 448 down to 2^-10: an outlier of 10^6 sigma pushes what is under 2.2 sigma out of it."""
    values = gaussian(256, 512)
    values[:, 7] = 1e6
    losses = measure(values, E4M3, None).losses
    smallest = 2.0**-10 * 1e6 / 448
    expected = math.erf(smallest / math.sqrt(2)) * 511 / 512
    assert losses["current"].underflow == pytest.approx(expected, abs=0.005)
    assert losses["block"].underflow == pytest.approx(expected / 4, abs=0.01)  # one block of four in every row
    assert losses["mxfp8"].underflow == pytest.approx(expected / 16, abs=0.005)
    assert losses["current"].saturated == losses["block"].saturated == losses["mxfp8"].saturated == 0


def test_an_outlier_row_of_a_weight_costs_its_square_blocks_only():
    values = gaussian(512, 256)
    values[5] *= 1e6
    losses = measure(values, E4M3, None, square=True).losses
    assert losses["current"].underflow > 0.9
    assert 0.2 < losses["block"].underflow < 0.25  # the first 128 rows of 512
    assert losses["mxfp8"].underflow < 1e-4


def test_a_scale_that_is_too_large_saturates_what_lies_beyond_it():
    found = measure(gaussian(512, 512), E4M3, torch.tensor(448.0 / 2))  # amax was 2 sigma when it was recorded
    expected = math.erfc(2 / math.sqrt(2))
    assert found.losses["delayed"].saturation == pytest.approx(expected, rel=0.05)
    assert found.losses["current"].saturated == 0


@pytest.mark.parametrize("amax", [3.3, 1e-3, 7.77e5, 0.1])
def test_a_scale_made_of_the_amax_itself_saturates_nothing_whatever_the_rounding(amax):
    values = torch.tensor([[amax, -amax]])
    scale = numerics.current_scale(numerics.amax(values), E5M2)
    assert measure(values, E5M2, scale).losses["delayed"].saturated == 0


def test_sqnr_is_that_of_a_uniform_quantizer_where_all_values_share_a_binade():
    """In [1, 2) E4M3 steps by 1/8: the error is step / sqrt(12)."""
    values = torch.rand(512, 512, generator=torch.Generator().manual_seed(0)) + 1
    loss = measure(values, E4M3, torch.tensor(1.0)).losses["delayed"]
    expected = 10 * math.log10((7 / 3) / (0.125**2 / 12))
    assert loss.sqnr == pytest.approx(expected, abs=0.02)


def test_delayed_scaling_without_a_scale_is_not_measured():
    found = measure(gaussian(8, 8), E4M3, None)
    assert found.losses["delayed"] == Loss()
    assert found.losses["delayed"].underflow == 0.0
    assert found.losses["current"].elements == 64


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 400), columns=st.integers(1, 700), square=st.booleans(), parts=st.integers(1, 3))
def test_parts_of_whole_blocks_merge_into_what_the_whole_gives(rows, columns, square, parts):
    values = gaussian(rows, columns, seed=rows) * torch.exp2(gaussian(rows, 1, seed=columns) * 5)
    scale = torch.tensor(20.0)
    whole = measure(values, E5M2, scale, square=square)
    merged = Statistics()
    for part in values.split(128 * parts):
        merged = merged.merge(measure(part, E5M2, scale, square=square, amax=numerics.amax(values)))
    assert counts(merged) == counts(whole)
    assert merged.kurtosis == pytest.approx(whole.kurtosis, rel=1e-9)
    for scaling in FP8_SCALINGS:
        assert merged.losses[scaling].error == pytest.approx(whole.losses[scaling].error, rel=1e-9)


def counts(found):
    losses = {name: (loss.elements, loss.underflows, loss.saturated) for name, loss in found.losses.items()}
    return found.elements, found.zeros, found.nonfinite, found.amax, losses


def test_merging_counts_does_not_depend_on_the_order():
    parts = [measure(gaussian(9, 40, seed=i) * 10.0**i, E4M3, torch.tensor(1.0)) for i in range(4)]
    left, right = Statistics(), Statistics()
    for part in parts:
        left = left.merge(part)
    for part in reversed(parts):
        right = part.merge(right)
    assert counts(left) == counts(right)
    assert left.amax == max(part.amax for part in parts)


@pytest.mark.parametrize("columns", [1, 100, 128, 512, 5000, 2**20])
def test_a_tensor_is_looked_at_in_pieces_of_one_size_whatever_its_own(columns):
    """Rows that repeat one row take no memory: the tensor is of 2^40 of them, and nothing is made of it at once."""
    rows = torch.randn(1, columns).bfloat16().expand(2**40, columns)
    for tiles in itertools.islice(health._tiles(rows), 3):
        assert tiles.numel() <= max(numerics.PIECE, 128 * 128)
        assert tiles.dtype == torch.float32


@pytest.mark.parametrize("shape", [(), (5,), (0, 4), (2, 3, 40)], ids=str)
def test_any_shape_is_taken_as_rows(shape):
    found = measure(torch.full(shape, 2.0), E4M3, None)
    assert found.elements == math.prod(shape)
    assert found.amax == (2.0 if found.elements else 0.0)


def test_statistics_are_the_same_after_being_numbers():
    found = measure(gaussian(70, 70) * 1e3, E5M2, torch.tensor(7.0))
    numbers = found.as_row()
    assert len(numbers) == ROW_LENGTH
    assert Statistics.from_row(torch.tensor(numbers, dtype=torch.float64).tolist()) == found


@pytest.mark.parametrize(
    ("place", "number"), [(0, 0.5), (0, -1), (1, 5000), (3, math.nan), (3, -1.0), (7, 9999), (9, math.nan), (2, 2**60)]
)
def test_numbers_that_no_tensor_gives_are_refused(place, number):
    numbers = measure(gaussian(70, 70), E4M3, None).as_row()
    numbers[place] = number
    with pytest.raises(ValueError, match="not a|more elements"):
        Statistics.from_row(numbers)
