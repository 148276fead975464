"""Merging, resizing and checking FP8 state."""

import pytest
import torch
from hypothesis import given, strategies as st

from precisionctl.errors import DamagedCheckpoint, RecipeError
from precisionctl.fp8.state import ATTENTION, ROLES, DelayedScaling, Fp8State, RoleState


def role(scale, *history):
    return RoleState(torch.tensor(scale), torch.tensor(history))


def alike(part):
    return Fp8State(dict.fromkeys(ROLES, part))


def test_hybrid_is_e4m3_forward_and_e5m2_backward():
    hybrid, e4m3 = DelayedScaling(), DelayedScaling(fp8_format="E4M3")
    assert [str(hybrid.dtype(name))[-6:] for name in ROLES] == ["e4m3fn"] * 3 + ["8_e5m2"] * 2
    assert [name for name in ATTENTION if hybrid.dtype(name) == torch.float8_e5m2] == ["d_o", "d_qkv", "d_p"]
    assert {str(e4m3.dtype(name)) for name in ROLES + ATTENTION} == {"torch.float8_e4m3fn"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("margin", 65), ("margin", 0.5), ("fp8_format", "E5M2"), ("amax_history_len", 0), ("amax_history_len", True),
     ("amax_compute_algo", "mean"), ("reduce_amax", 1), ("fp8_dpa", None)],
)  # fmt: skip
def test_a_recipe_that_makes_no_sense_names_the_field(field, value):
    with pytest.raises(RecipeError, match=field):
        DelayedScaling(**{field: value})


def test_merging_takes_the_largest_amaxes_and_the_smallest_scale():
    merged = Fp8State.merge([alike(role(4.0, 0.0, 1.0, 5.0)), alike(role(2.0, 0.0, 3.0, 4.0))])
    for part in merged.roles.values():
        assert part.scale == 2.0
        assert part.amax_history.tolist() == [0.0, 3.0, 5.0]


def test_merging_passes_over_parts_that_were_never_recorded():
    merged = Fp8State.merge([Fp8State.fresh(3), alike(role(4.0, 0.0, 1.0, 5.0)), Fp8State.fresh(3)])
    assert merged.roles["input"].scale == 4.0
    assert merged.roles["input"].amax_history.tolist() == [0.0, 1.0, 5.0]


def test_merging_what_was_never_recorded_stays_so():
    merged = Fp8State.merge([Fp8State.fresh(3), Fp8State.fresh(3)])
    assert not any(part.recorded for part in merged.roles.values())


def test_merging_attentions_keeps_the_roles_that_any_has():
    parts = [Fp8State({"k": role(4.0, 0.0, 1.0)}), Fp8State({"k": role(2.0, 0.0, 3.0), "s": role(1.0, 0.0, 5.0)})]
    merged = Fp8State.merge(parts)
    assert merged.roles["k"].amax_history.tolist() == [0.0, 3.0]
    assert merged.roles["s"].amax_history.tolist() == [0.0, 5.0]


@pytest.mark.parametrize(
    ("part", "recorded"),
    [(role(1.0, 0.0), False), (role(2.0, 0.0), True), (role(1.0, 0.0, 448.0), True), (role(1.0, 3.0), True)],
)
def test_never_recorded_means_scale_one_and_an_empty_history(part, recorded):
    assert part.recorded is recorded


@given(old=st.integers(1, 12), new=st.integers(1, 12))
def test_resizing_keeps_the_staging_row_and_the_newest_rows(old, new):
    rows = [float(row) for row in range(1, old + 1)]
    resized = role(3.0, *rows).resized(new)
    newest = rows[1:][max(0, old - new) :] if new > 1 else []
    assert resized.amax_history.tolist() == [1.0, *[0.0] * (new - 1 - len(newest)), *newest]
    assert resized.scale == 3.0


@given(old=st.integers(1, 12), more=st.integers(0, 12))
def test_growing_and_shrinking_back_changes_nothing(old, more):
    state = RoleState(torch.tensor(2.0), torch.rand(old))
    assert torch.equal(state.resized(old + more).resized(old).amax_history, state.amax_history)


def test_the_states_of_several_experts_resize_and_merge_together():
    experts = RoleState(torch.tensor([2.0, 4.0]), torch.tensor([[0.0, 1.0, 2.0], [0.0, 3.0, 4.0]]))
    assert experts.resized(2).amax_history.tolist() == [[0.0, 2.0], [0.0, 4.0]]
    experts.check("experts")


@pytest.mark.parametrize(
    ("part", "what"),
    [
        (RoleState(torch.ones(()).half(), torch.zeros(2)), "FP32"),
        (RoleState(torch.ones(2), torch.zeros(2)), "shapes"),
        (RoleState(torch.ones(2), torch.zeros(3, 2)), "shapes"),
        (RoleState(torch.ones(1, 1), torch.zeros(1, 1, 2)), "shapes"),
        (role(0.0, 0.0), "positive"),
        (RoleState(torch.ones(()), torch.zeros(0)), "empty"),
    ],
)
def test_what_te_cannot_have_left_is_damage(part, what):
    with pytest.raises(DamagedCheckpoint, match=what):
        part.check("layer 3")


def test_an_infinite_amax_is_real_and_the_recipe_s_length_is_kept():
    alike(role(2.0, 0.0, float("inf"))).check(DelayedScaling(amax_history_len=2), "layer 3")
    with pytest.raises(DamagedCheckpoint, match="2 rows under a recipe of 3"):
        alike(role(2.0, 0.0, 1.0)).check(DelayedScaling(amax_history_len=3), "layer 3")
