"""Codes that come back: through BF16 and FP32, under scales for tensors, rows and blocks of any size."""

import fp8_directories
import pytest
import torch
from hypothesis import given, settings, strategies as st

from precisionctl.codes import nibbles, numerics
from precisionctl.codes.blocks import BlockScales, share
from precisionctl.codes.elements import E4M3, FP8, INT4, INT8, Element
from precisionctl.codes.encoding import Encoding, by_rows, from_rows, grid_shape
from precisionctl.dtypes import DType

FORMATS = pytest.mark.parametrize("dtype", fp8_directories.LAYOUTS)


def all_codes(dtype: torch.dtype) -> torch.Tensor:
    numbers = [code for code in range(256) if code not in fp8_directories.LAYOUTS[dtype][3]]
    return torch.tensor(numbers, dtype=torch.uint8).view(dtype)


def some_scales(count: int, low: float, high: float) -> torch.Tensor:
    """FP32 with random mantissas, and those next to powers of two."""
    generator = torch.Generator().manual_seed(0)
    scales = (low + (high - low) * torch.rand(count, generator=generator)).exp2()
    powers = torch.arange(int(low), int(high)).float().exp2()
    return torch.cat([scales, powers, powers.nextafter(torch.tensor(0.0)), powers.nextafter(torch.tensor(1e30))])


@FORMATS
@pytest.mark.parametrize("through", [torch.bfloat16, torch.float32])
def test_every_code_comes_back_under_its_own_scale(dtype: torch.dtype, through: torch.dtype) -> None:
    """All codes of all formats, one row for each of 20,000 scales and more, 2^-90 to 2^90."""
    codes, scales = all_codes(dtype), some_scales(20_000, -90, 90).unsqueeze(1)
    rows = codes.view(torch.uint8).expand(len(scales), -1).contiguous().view(dtype)
    values = numerics.decode(rows, scales).to(through)
    again = torch.empty_like(rows)
    numerics.encode_by_scale_inv(values, scales, again, torch.empty(numerics.PIECE))
    assert torch.equal(again.view(torch.uint8), rows.view(torch.uint8))


Sample = tuple[int, int, tuple[int, int], torch.Tensor]
"""Rows, columns, block and grid."""


@st.composite
def grids(draw: st.DrawFn) -> Sample:
    rows, columns = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    block = draw(st.sampled_from([1, 3, 8, 16, rows])), draw(st.sampled_from([4, 8, 16, columns]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    grid = fp8_directories.random_scales(grid_shape(rows, columns, block), generator, torch.float32)
    return rows, columns, block, grid


@settings(deadline=None)
@given(grids())
def test_a_carried_grid_gives_the_same_codes_and_is_kept(
    sample: Sample,
) -> None:
    rows, columns, block, grid = sample
    codes = fp8_directories.random_codes((rows, columns), torch.Generator().manual_seed(1), torch.float8_e4m3fn)
    carried = Encoding(E4M3, grid, block)
    values = carried.decode_rows(codes, 0).bfloat16()
    expected = fp8_directories.decoded(codes, grid.numpy(), block)
    assert torch.equal(values, torch.from_numpy(expected).bfloat16())
    fit = BlockScales(rows, columns, block, FP8[DType.of(codes.dtype)], carried)
    for row in range(0, rows, 7):
        fit.see(values[row : row + 7], row)
    kept = fit.settle(torch.float32, "FP32")
    assert bool(fit.fits.all()) and torch.equal(kept.scale_inv, grid)
    for row in range(0, rows, 5):
        again = kept.encode_rows(values[row : row + 5], row)
        assert torch.equal(again.view(torch.uint8), codes[row : row + 5].view(torch.uint8))


@settings(deadline=None)
@given(grids(), st.data())
def test_a_block_that_has_changed_and_no_other_gets_a_new_scale(sample: Sample, data: st.DataObject) -> None:
    rows, columns, block, grid = sample
    codes = fp8_directories.random_codes((rows, columns), torch.Generator().manual_seed(1), torch.float8_e4m3fn)
    carried = Encoding(E4M3, grid, block)
    values = carried.decode_rows(codes, 0).bfloat16()
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    place = (row // block[0], column // block[1])
    values[row, column] = grid[place] * 1000  # beyond the largest code
    fit = BlockScales(rows, columns, block, FP8[DType.of(codes.dtype)], carried)
    fit.see(values, 0)
    expected = torch.ones_like(fit.fits)
    expected[place] = False
    assert torch.equal(fit.fits, expected)
    inside = values[place[0] * block[0] :][: block[0], place[1] * block[1] :][:, : block[1]]
    made = fit.settle(torch.float32, "FP32").scale_inv
    assert made[place] == inside.abs().max().float() / 448
    assert torch.equal(made[expected], grid[expected])


@pytest.mark.parametrize("element", [E4M3, INT4, INT8], ids=lambda element: element.name)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("factor", [1e-7, 1e9])
def test_codes_are_numbers_under_scales_that_fp16_has_no_number_for(
    element: Element, shifted: bool, factor: float
) -> None:
    """Rows that have changed, of which one has values as small, or as large, that their scale is stored as FP16's
    smallest or largest number. So nothing is NaN, and codes are off by half a step of that scale, or by what it does
    not reach."""
    if shifted and element is E4M3:
        return
    zeros = torch.zeros(3, 1) if shifted else None
    carried = Encoding(element, torch.full((3, 1), 0.01).half(), (1, 128), zeros=zeros)
    values = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    values[1], values[2] = values[1] * factor, 0
    fit = BlockScales(3, 128, (1, 128), element, carried, zero_points=shifted)
    fit.see(values, 0)
    made, scratch = fit.settle(torch.float16, "FP32"), torch.empty(nibbles.SCRATCH)
    made = fit.searched(values, 0, made, scratch) if fit.searches else made
    limits = torch.finfo(torch.float16)
    assert made.scale_inv[1] == (2.0**-24 if factor < 1 else limits.max)
    back = made.decode_rows(made.encode_rows(values, 0), 0)
    assert bool(back.isfinite().all()) and not back[2].any()
    if factor < 1:
        assert float((back[1] - values[1]).abs().max()) <= 2.0**-24


def test_a_value_between_two_codes_is_a_change_too() -> None:
    carried = Encoding(E4M3, torch.tensor([[0.5]]), (2, 2))
    fit = BlockScales(2, 2, (2, 2), E4M3, carried)
    fit.see(torch.tensor([[8.0, 0.5], [8.25, 0.0]], dtype=torch.bfloat16), 0)  # 16.5 is between 16 and 18
    assert not fit.fits.any()


def test_infinity_tells_nothing_of_its_code() -> None:
    carried = Encoding(E4M3, torch.tensor([[2.0**127]]), (1, 2))
    values = carried.decode_rows(torch.tensor([[2.0, 4.0]]).to(torch.float8_e4m3fn), 0)
    assert values.isinf().all()
    fit = BlockScales(1, 2, (1, 2), E4M3, carried)
    fit.see(values, 0)
    assert not fit.fits.any()


@pytest.mark.parametrize("amax, expected", [(448.0, 1.0), (449.0, 2.0), (224.0, 0.5), (0.0, 1.0), (1e-30, None)])
def test_new_powers_of_two_are_the_smallest_under_which_nothing_saturates(amax: float, expected: float | None) -> None:
    fit = BlockScales(1, 2, (1, 2), E4M3, None)
    fit.see(torch.tensor([[amax, -amax / 2]]), 0)
    for dtype, rounding in ((torch.float8_e8m0fnu, "FP32"), (torch.float32, "powers of 2")):
        scale = float(fit.settle(dtype, rounding).scale_inv.float())
        assert expected in (None, scale)
        assert amax <= 448 * scale and (amax == 0 or 448 * scale < 2 * amax or scale == 2.0**-63)
        assert dtype == torch.float8_e8m0fnu or scale >= 2.0**-63  # with less, engines do not compute


def test_tensors_that_share_a_scale_keep_the_carried_one_only_together() -> None:
    def fits(*scales: float) -> list[BlockScales]:
        found = [BlockScales(1, 1, (1, 1), E4M3, Encoding(E4M3, torch.tensor([[s]]), (1, 1))) for s in scales]
        for fit, scale in zip(found, scales, strict=True):
            fit.see(torch.tensor([[448 * scale]]), 0)
        share(found)
        return found

    assert [float(fit.settle(torch.float32, "FP32").scale_inv) for fit in fits(0.25, 0.25)] == [0.25, 0.25]
    assert [float(fit.settle(torch.float32, "FP32").scale_inv) for fit in fits(0.25, 0.5)] == [0.5, 0.5]
    assert not any(bool(fit.fits.any()) for fit in fits(0.25, 0.5))


@settings(deadline=None)
@given(grids(), st.integers(0, 99))
def test_scales_move_with_their_rows(sample: Sample, seed: int) -> None:
    rows, columns, block, grid = sample
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    encoding = Encoding(E4M3, grid, block)
    moved = from_rows(by_rows(encoding, rows)[order], encoding, columns)
    dense = encoding.scales(0, rows, columns).expand(rows, columns)
    assert torch.equal(moved.scales(0, rows, columns).expand(rows, columns), dense[order])
    still = from_rows(by_rows(encoding, rows), encoding, columns)
    assert still.scale_inv.numel() <= grid.numel()


@settings(deadline=None)
@given(grids(), st.sampled_from([(1, 40), (8, 8), (16, 4), (40, 40), (5, 7)]))
def test_other_blocks_have_a_scale_where_all_of_theirs_are_one(sample: Sample, other: tuple[int, int]) -> None:
    rows, columns, block, grid = sample
    grid = grid.round(decimals=2)  # so that neighbours are equal now and then
    encoding = Encoding(E4M3, grid, block)
    found = encoding.in_blocks(rows, columns, other)
    dense = encoding.scales(0, rows, columns).expand(rows, columns)
    assert found.shape == grid_shape(rows, columns, other)
    for i in range(found.shape[0]):
        for j in range(found.shape[1]):
            inside = dense[i * other[0] :][: other[0], j * other[1] :][:, : other[1]]
            one = bool((inside == inside[0, 0]).all())
            if not found[i, j].isnan():
                assert one and found[i, j] == inside[0, 0]
            elif one:  # told of nothing, rather than looked for element by element
                assert block[0] % other[0] or block[1] % other[1]
