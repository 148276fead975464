"""Every form that TE's extra state has had since 0.1, as TE made it, is read number for number."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from te_pickles import (
    NOTHING,
    VERSIONS,
    TEDelayedScaling,
    empty_file,
    of_module,
    of_operation,
    pickled,
    recipe_object,
    te_state,
    unpickled,
)
from te_states import same

from precisionctl.checkpoints.megatron.payloads import payload_bytes
from precisionctl.errors import NotUnderstood
from precisionctl.fp8.extra_state import decode_payload, read_payload
from precisionctl.fp8.extra_state_writer import encode_payload
from precisionctl.fp8.state import ATTENTION_BACKWARD, ATTENTION_FORWARD, ROLES, DelayedScaling, Fp8State, RoleState

scales = st.floats(2.0**-100, 2.0**100, width=32)
amaxes = st.one_of(scales, st.sampled_from([0.0, float("inf"), 1e-45]))


@st.composite
def recipes(draw):
    return DelayedScaling(
        margin=draw(st.integers(-4, 9)),
        fp8_format=draw(st.sampled_from(["HYBRID", "E4M3"])),
        amax_history_len=draw(st.sampled_from([1, 2, 5, 16])),
        amax_compute_algo=draw(st.sampled_from(["max", "most_recent"])),
        reduce_amax=draw(st.booleans()),
        fp8_dpa=draw(st.booleans()),
        fp8_mha=draw(st.booleans()),
    )


@st.composite
def made(draw, roles=ROLES):
    recipe = draw(recipes())
    length = recipe.amax_history_len
    rows = st.lists(amaxes, min_size=length, max_size=length)
    return recipe, Fp8State({role: RoleState(torch.tensor(draw(scales)), torch.tensor(draw(rows))) for role in roles})


def as_kept(state, recipe, *, without=("output", "grad_input")):
    """The same with the roles as TE starts them that a form has no columns for."""
    return Fp8State({**state.roles, **dict.fromkeys(without, RoleState.fresh(recipe.amax_history_len))})


def known_of(recipe, version):
    """What a payload without a recipe still tells of it."""
    if version >= (2, 0):
        return recipe
    return DelayedScaling(fp8_format=recipe.fp8_format, amax_history_len=recipe.amax_history_len)


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: ".".join(map(str, version)))
@settings(max_examples=12, deadline=None)
@given(made=made())
def test_a_module_s_state_of_every_version_is_read_number_for_number(version, made):
    recipe, state = made
    payload = read_payload(payload_bytes(of_module(state, recipe, version), "here"), "here")
    expected = as_kept(state, recipe) if version < (0, 6) else state
    assert same(payload.state("here"), expected)
    if version >= (0, 3):  # a list of 0.1 and 0.2 does not tell its format either
        assert payload.recipe == known_of(recipe, version)
    assert payload.assumed == (version < (2, 0))


@pytest.mark.parametrize("version", [(1, 13), (1, 14), (2, 0), (2, 4), (2, 20)], ids=str)
@settings(max_examples=12, deadline=None)
@given(made=made())
def test_a_fused_operation_s_state_is_that_of_a_linear_without_output_and_grad_input(version, made):
    recipe, state = made
    found, read = decode_payload(of_operation(state, recipe, version), "here")
    assert same(read, as_kept(state, recipe))
    assert found.amax_history_len == recipe.amax_history_len
    assert found == recipe or version < (2, 4)


ATTENTION = ATTENTION_FORWARD + ATTENTION_BACKWARD
UNUSED = "unused"
WHOLE = (
    (UNUSED, UNUSED, "qkv", "o", UNUSED, UNUSED, UNUSED, UNUSED, "s"),
    ("d_qkv", UNUSED, UNUSED, "d_o", UNUSED, "d_p"),
)
SOFTMAX = ((UNUSED, UNUSED, "s"), (UNUSED, "d_p"))


@pytest.mark.parametrize("layout", [WHOLE, SOFTMAX], ids=["delayed scaling", "beside current scaling"])
@pytest.mark.parametrize("version", [(1, 6), (1, 8), (1, 14), (2, 20)], ids=str)
@settings(max_examples=8, deadline=None)
@given(made=made(roles=ATTENTION))
def test_attention_s_state_is_read_number_for_number(layout, version, made):
    recipe, state = made
    fresh = RoleState.fresh(recipe.amax_history_len)
    kept = Fp8State({**state.roles, UNUSED: fresh})
    forward, backward = layout
    data = payload_bytes(of_module(kept, recipe, version, forward, backward, gemms=3), "here")
    _, read = decode_payload(data, "here")
    assert same(read, Fp8State({role: state.roles[role] for role in ATTENTION if role in forward + backward}))


@pytest.mark.parametrize("value", [*NOTHING.values(), empty_file()], ids=[*NOTHING, "0.12 to 1.13"])
def test_modules_without_state_leave_nothing(value):
    assert read_payload(payload_bytes(value, "here"), "here") is None


def test_megatron_s_subclass_of_the_recipe_is_the_recipe():
    recipe, state = DelayedScaling(amax_history_len=2), Fp8State.fresh(2)
    found = te_state(state, recipe, (2, 2), forward=ROLES[:3], backward=ROLES[3:])
    found["recipe"] = recipe_object(recipe, (2, 2), TEDelayedScaling)
    assert decode_payload(pickled(found), "here")[0] == recipe


def test_a_buffer_s_index_of_te_1_6_is_left_out_of_what_is_written():
    """In the meta of a newer TE it would keep the module out of the update for good (quantization.py,
    add_fp8_tensors_to_global_buffer)."""

    recipe, state = DelayedScaling(amax_history_len=2), Fp8State.fresh(2)
    old = payload_bytes(of_module(state, recipe, (1, 6)), "here")
    found, read = decode_payload(old, "here")
    for te in (1, 2):
        kept = unpickled(encode_payload(read, found, te))["extra_fp8_variables"]
        assert kept.keys() == {"fp8_checkpoint", "num_gemms", "fp8_max_fwd", "fp8_max_bwd"}


def test_two_gemms_are_not_understood():
    recipe = DelayedScaling(amax_history_len=2)
    state = Fp8State.fresh(2)
    data = payload_bytes(of_module(state, recipe, (2, 20), ROLES[:3] * 2, ROLES[3:] * 2, gemms=2), "here")
    with pytest.raises(NotUnderstood, match="2 GEMMs"):
        decode_payload(data, "here")
