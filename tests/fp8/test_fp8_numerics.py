"""FP8 arithmetic against an independent slow port of TE's fused kernel, and over every code there is."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from soaking import first, in_soak
from te_kernels import FLT_MAX, fused_kernel_step

from precisionctl.codes import elements, numerics
from precisionctl.fp8 import delayed_scaling
from precisionctl.fp8.state import DelayedScaling, Fp8State, RoleState

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])

EDGES = [0.0, math.inf, math.nan, 1e-45, 1e-40, 1.1754944e-38, 1.3e-36, 448.0, 57344.0, 1.0, float(FLT_MAX)]
"""Zero, infinity, NaN, the smallest subnormal, a subnormal, the smallest normal, the neighbourhood of the smallest
amax with a finite scale, both largest codes, one, the largest float."""


def fp32(low, high):
    return st.floats(low, high, width=32, allow_nan=False)


amaxes = st.one_of(st.sampled_from(EDGES), fp32(0.0, 2.0**127), fp32(0.0, 1.0), fp32(100.0, 1000.0))


@pytest.mark.parametrize(
    ("history", "algorithm"),
    [
        *((1, "most_recent"), (1024, "max")),
        *in_soak((1, "max"), (1024, "most_recent")),
        *in_soak(*((history, algorithm) for history in (2, 3, 16) for algorithm in ("max", "most_recent"))),
    ],
)
@settings(max_examples=60, deadline=None)
@given(steps=st.lists(amaxes, min_size=1, max_size=40), margin=st.integers(-3, 9), e5m2=st.booleans())
def test_every_step_of_a_random_sequence_is_the_fused_kernels_to_the_bit(history, algorithm, steps, margin, e5m2):
    dtype = E5M2 if e5m2 else E4M3
    recipe = DelayedScaling(margin=margin, amax_history_len=history, amax_compute_algo=algorithm)
    state = RoleState.fresh(history)
    rows, scale = [np.float32(0)] * history, np.float32(1)
    for amax in steps:
        state.amax_history[0] = amax
        rows[0] = np.float32(amax)
        state = delayed_scaling.update_delayed(state, dtype, recipe)
        with np.errstate(over="ignore", under="ignore"):
            scale = fused_kernel_step(rows, scale, 57344.0 if e5m2 else 448.0, margin, algorithm)
        assert state.scale.numpy().tobytes() == scale.tobytes()
        assert state.amax_history.numpy().tobytes() == np.array(rows, dtype=np.float32).tobytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), history=st.sampled_from([1, 2, 16]), algorithm=st.sampled_from(["max", "most_recent"]))
def test_columns_updated_together_are_updated_as_if_alone(data, history, algorithm):
    recipe = DelayedScaling(amax_history_len=history, amax_compute_algo=algorithm)
    columns = torch.tensor(
        data.draw(st.lists(st.lists(amaxes, min_size=history, max_size=history), min_size=3, max_size=3))
    )
    scales = torch.tensor([1.0, 7.5, float(FLT_MAX)])
    together = delayed_scaling.update_delayed(RoleState(scales, columns), E4M3, recipe)
    for i in range(3):
        alone = delayed_scaling.update_delayed(RoleState(scales[i], columns[i]), E4M3, recipe)
        assert together.scale[i] == alone.scale
        assert together.amax_history[i].numpy().tobytes() == alone.amax_history.numpy().tobytes()


def test_an_unused_tensor_keeps_its_history_and_its_scale():
    state = RoleState(torch.tensor(3.0), torch.tensor([0.0, 5.0, 7.0]))
    after = delayed_scaling.update_delayed(state, E4M3, DelayedScaling(amax_history_len=3))
    assert after.scale == 3.0
    assert after.amax_history.tolist() == [0.0, 5.0, 7.0]


def test_an_update_does_not_change_the_state_it_was_given():
    state = RoleState(torch.tensor(3.0), torch.tensor([2.0, 5.0, 7.0]))
    delayed_scaling.update_delayed(state, E4M3, DelayedScaling(amax_history_len=3))
    assert state.amax_history.tolist() == [2.0, 5.0, 7.0]


def test_an_infinite_amax_freezes_the_scale_until_it_leaves_the_window():
    recipe = DelayedScaling(amax_history_len=3)
    state = delayed_scaling.after_one_update(torch.tensor(2.0), "input", recipe)
    scales = []
    for amax in (math.inf, 4.0, 4.0, 4.0):
        state.amax_history[0] = amax
        state = delayed_scaling.update_delayed(state, E4M3, recipe)
        scales.append(float(state.scale))
    assert scales == [224.0, 224.0, 224.0, 112.0]


@FORMATS
def test_one_update_gives_the_scale_of_the_amax_and_makes_it_the_newest_row(dtype):
    role = "grad_output" if dtype == E5M2 else "weight"
    state = delayed_scaling.after_one_update(torch.tensor(3.5), role, DelayedScaling(margin=1, amax_history_len=4))
    assert state.scale == numerics.largest_code(dtype) / 3.5 / 2
    assert state.amax_history.tolist() == [0.0, 0.0, 0.0, 3.5]


def slow_current_scale(amax, fp8_max, power_of_2):
    """compute_scale_from_amax of TransformerEngine's recipe_common.cuh, with an epsilon of 0, on np.float32."""
    if np.isinf(amax) or amax == 0 or np.isnan(amax):
        return np.float32(1)
    scale = np.float32(fp8_max) / amax
    scale = FLT_MAX if np.isinf(scale) else scale
    return (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32) if power_of_2 else scale


@settings(max_examples=300, deadline=None)
@given(amax=amaxes, power_of_2=st.booleans(), e5m2=st.booleans())
def test_current_scaling_is_te_s_to_the_bit(amax, power_of_2, e5m2):
    dtype = E5M2 if e5m2 else E4M3
    ours = numerics.current_scale(torch.tensor(amax), dtype, power_of_2=power_of_2)
    with np.errstate(over="ignore", under="ignore"):
        largest = numerics.largest_code(dtype)
        theirs = slow_current_scale(np.float32(amax), largest, power_of_2)
    assert ours.numpy().tobytes() == theirs.tobytes()


def codes_of(dtype):
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def edge_scales():
    """Powers of two and their neighbours, out to where BF16 and FP32 end; scales from amaxes; odd mantissas."""
    powers = torch.tensor([2.0**e for e in (-111, -48, -12, -1, 0, 1, 12, 48, 116)])
    below, above = (torch.nextafter(powers, torch.tensor(to)) for to in (0.0, math.inf))
    made = 448.0 / torch.tensor([0.02, 0.1, 1 / 3, 3.0, 448.0, 1000.0])
    odd = torch.tensor([0x3FFFFFFF, 0x3F800001, 0x42FFFFFF], dtype=torch.int32).view(torch.float32)
    return torch.cat([powers, below, above, made, odd])


@FORMATS
@pytest.mark.parametrize("through", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("direction", ["scale", "scale_inv"])
def test_every_finite_code_encodes_back_to_itself_under_its_scale(dtype, through, direction):
    codes = codes_of(dtype)
    codes = codes[codes.float().isfinite()]
    for scale in edge_scales():
        values = numerics.decode(codes, scale.reciprocal()).to(through)
        if direction == "scale":
            again = numerics.encode(values, scale, dtype)
        else:
            again = torch.empty_like(codes)
            numerics.encode_by_scale_inv(values[:, None], scale.reciprocal(), again[:, None], torch.empty(64))
        assert again.view(torch.uint8).tolist() == codes.view(torch.uint8).tolist(), float(scale)


@FORMATS
def test_codes_that_are_not_numbers_stay_nan_and_infinities_become_the_largest_code(dtype):
    codes = codes_of(dtype)
    codes = codes[~codes.float().isfinite()]
    again = numerics.encode(codes.float(), torch.tensor(0.5), dtype).float()
    largest = codes.float().sign() * numerics.largest_code(dtype)
    expected = torch.where(codes.float().isnan(), torch.nan, largest)
    assert torch.equal(again.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


def test_codes_do_not_survive_fp16():
    codes = codes_of(E4M3)[:0x7F]
    values = numerics.decode(codes, torch.tensor(2.0**-18)).half()
    assert not torch.equal(numerics.encode(values, torch.tensor(2.0**18), E4M3).float(), codes.float())


@FORMATS
def test_encoding_rounds_to_nearest_even_and_saturates(dtype):
    """Against the nearest of all finite codes, found by trying each."""
    finite = codes_of(dtype).float()
    finite = finite[finite.isfinite()].unique()
    middles = (finite[1:] + finite[:-1]) / 2
    outside = torch.tensor([finite[-1] * 1.5, -finite[-1] * 2, math.inf, -math.inf, 3e38])
    values = torch.cat([finite, middles, torch.nextafter(middles, torch.tensor(math.inf)), outside])
    distance = (values.double().clamp(-1e300, 1e300)[:, None] - finite.double()).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    encoded = numerics.encode(values, torch.ones(()), dtype)
    assert (nearest & (finite == encoded.float()[:, None])).any(1).all()
    tied = nearest.sum(1) == 2
    assert (encoded.view(torch.uint8)[tied] % 2 == 0).all()
    assert tied.sum() == len(middles)


def test_codes_of_inference_formats_come_from_a_division_that_rounds_once():
    """Quotients that lie exactly between two codes go to the even one; a product with 1 / scale_inv misses some."""
    finite = codes_of(E4M3)[:0x7F].float()
    middles = (finite[1:] + finite[:-1]) / 2
    scale_inv = torch.arange(1.0, 200.0)[:, None]
    codes = torch.empty(len(scale_inv), len(middles), dtype=E4M3)
    numerics.encode_by_scale_inv(middles * scale_inv, scale_inv, codes, torch.empty(numerics.PIECE))
    assert (codes.view(torch.uint8) % 2 == 0).all()


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 40), scratch=st.integers(1, 50), per_row=st.booleans())
def test_pieces_of_any_size_give_the_codes_of_the_whole(rows, columns, scratch, per_row):
    generator = torch.Generator().manual_seed(rows * columns)
    values = torch.randn(rows, columns, generator=generator) * 100
    scale_inv = torch.rand(rows, 1, generator=generator) + 0.1 if per_row else torch.tensor([0.3])
    codes = torch.empty(values.shape, dtype=E4M3)
    numerics.encode_by_scale_inv(values, scale_inv, codes, torch.empty(scratch))
    whole = (values / scale_inv).clamp(-448, 448).to(E4M3)
    assert torch.equal(codes.view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (5,), (0, 4), (3, 0), (2, 3, 4), (300, 1000)], ids=str)
def test_encoding_keeps_the_shape_of_any_tensor(shape):
    values = torch.full(shape, 2.0, dtype=torch.bfloat16)
    codes = numerics.encode(values, torch.tensor(3.0), E5M2)
    assert codes.shape == shape
    assert (codes.float() == 6.0).all()


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], 0.0), ([0.0, -0.0], 0.0), ([1.0, -3.0], 3.0), ([math.nan, 2.0, -5.0], 5.0), ([math.nan], 0.0),
     ([-math.inf, math.nan], math.inf)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax_is_the_largest_magnitude_and_passes_over_nan(values, expected, dtype):
    amax = numerics.amax(torch.tensor(values, dtype=dtype))
    assert amax.dtype == torch.float32 and amax.shape == ()
    assert float(amax) == expected
    assert not amax.signbit()


def test_scale_inv_is_amax_over_the_largest_code_and_one_where_that_is_no_number():
    amax = torch.tensor([448.0, 3.0, 0.0, math.inf, math.nan, 1e-45])
    expected = torch.tensor([1.0, np.float32(3.0) / np.float32(448.0), 1.0, 1.0, 1.0, 1.0])
    assert torch.equal(numerics.scale_inv(amax, elements.E4M3), expected)


@pytest.mark.parametrize("margin", [0, 3])
@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_the_recorded_amax_comes_from_the_history_else_from_the_scale_else_is_zero(role, margin):
    recipe = DelayedScaling(margin=margin, amax_history_len=3)
    full = RoleState(torch.tensor(9.0), torch.tensor([0.0, 4.0, math.inf]))
    assert delayed_scaling.recorded_amax(full, role, recipe) == 4.0
    assert delayed_scaling.recorded_amax(RoleState.fresh(3), role, recipe) == 0.0
    short = DelayedScaling(margin=margin, amax_history_len=1)
    at_rest = delayed_scaling.after_one_update(torch.tensor(0.75), role, short)
    assert at_rest.amax_history.tolist() == [0.0]
    assert float(delayed_scaling.recorded_amax(at_rest, role, short)) == pytest.approx(0.75, rel=2**-23)


CHANGES = [
    DelayedScaling(amax_history_len=6, margin=2),
    DelayedScaling(amax_history_len=6, fp8_format="E4M3"),
    DelayedScaling(amax_history_len=6, amax_compute_algo="most_recent"),
    DelayedScaling(amax_history_len=3, margin=1),
    DelayedScaling(amax_history_len=12, fp8_format="E4M3", amax_compute_algo="most_recent"),
]


def run_steps(recipe, amaxes):
    state = Fp8State.fresh(recipe.amax_history_len)
    for amax in amaxes:
        for part in state.roles.values():
            part.amax_history[0] = amax
        updated = {r: delayed_scaling.update_delayed(part, recipe.dtype(r), recipe) for r, part in state.roles.items()}
        state = Fp8State(updated)
    return state


@pytest.mark.parametrize(
    "new", first(1, CHANGES), ids=lambda recipe: f"{recipe.amax_history_len}-{recipe.amax_compute_algo}"
)
@settings(max_examples=30, deadline=None)
@given(steps=st.lists(fp32(2.0**-20, 2.0**20), min_size=6, max_size=20))
def test_another_recipe_finds_the_scales_that_it_would_have_made_of_the_rows_that_are_left(new, steps):
    old = DelayedScaling(amax_history_len=6)
    before = run_steps(old, steps)
    changed = delayed_scaling.change_recipe(before, old, new)
    left = steps[-5:][-new.amax_history_len :]
    anew = run_steps(new, left)
    for role, part in changed.roles.items():
        same_arithmetic = (old.margin, old.dtype(role), old.amax_compute_algo) == (
            new.margin,
            new.dtype(role),
            new.amax_compute_algo,
        )
        assert part.scale == (before if same_arithmetic else anew).roles[role].scale
        assert torch.equal(part.amax_history, anew.roles[role].amax_history)


def test_another_length_alone_keeps_the_scale_and_what_was_never_recorded_stays_so():
    old, new = DelayedScaling(amax_history_len=1), DelayedScaling(amax_history_len=4)
    state = Fp8State(
        {"input": delayed_scaling.after_one_update(torch.tensor(3.0), "input", old), "output": RoleState.fresh(1)}
    )
    changed = delayed_scaling.change_recipe(state, old, new).roles
    assert changed["input"].scale == state.roles["input"].scale
    assert changed["input"].amax_history.tolist() == [0.0, 0.0, 0.0, 3.0]
    assert state.roles["input"].amax_history.tolist() == [0.0]
    assert not changed["output"].recorded
    assert delayed_scaling.change_recipe(state, old, DelayedScaling(margin=2)).roles["output"].scale == 1.0


def test_a_margin_changes_the_scale_by_a_power_of_two_even_when_only_the_scale_is_left():
    old, new = DelayedScaling(amax_history_len=1), DelayedScaling(amax_history_len=1, margin=2)
    state = Fp8State({"input": delayed_scaling.after_one_update(torch.tensor(4.0), "input", old)})
    assert delayed_scaling.change_recipe(state, old, new).roles["input"].scale == 448.0 / 4.0 / 4.0


@pytest.mark.parametrize("scratch", [2, 40, 100, numerics.PIECE], ids="{} numbers at a time".format)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_rows_amax_is_that_of_the_row_alone(dtype: torch.dtype, scratch: int) -> None:
    values = torch.randn(7, 33).to(dtype)
    values[2, 5], values[3, 1], values[4], values[5] = float("nan"), -float("inf"), -0.0, float("nan")
    expected = torch.stack([numerics.amax(row) for row in values]).unsqueeze(1)
    assert torch.equal(numerics.row_amax(values, torch.empty(scratch)), expected)
