"""TE payloads: those that TE's own code wrote, those that we write, and those that are damaged."""

import dataclasses
import pickletools

import pytest
import torch
from hypothesis import given, settings, strategies as st
from te_pickles import unpickled
from te_states import EMPTY, OTHER_FORMS, OTHERS, PAYLOADS, RECIPES, same, trained

from precisionctl.errors import DamagedCheckpoint, NotUnderstood, PrecisionctlError, PrecisionError
from precisionctl.fp8.extra_state import decode_payload
from precisionctl.fp8.extra_state_writer import encode_payload
from precisionctl.fp8.state import ATTENTION_BACKWARD, ATTENTION_FORWARD, ROLES, DelayedScaling, Fp8State, RoleState


def golden(name):
    return (PAYLOADS / f"{name}.bin").read_bytes()


def test_every_golden_payload_is_tested():
    assert {path.stem for path in PAYLOADS.iterdir()} == {*RECIPES, *OTHER_FORMS, *OTHERS, *EMPTY}


@pytest.mark.parametrize("name", RECIPES)
def test_a_payload_that_te_wrote_gives_its_recipe_and_every_number(name):
    recipe, state = decode_payload(golden(name), name)
    assert recipe == RECIPES[name]
    assert same(state, trained(recipe.amax_history_len))


@pytest.mark.parametrize("name", EMPTY)
def test_a_payload_without_state_is_none(name):
    assert decode_payload(golden(name), name) is None


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_other_forms_of_a_payload_give_every_number_of_a_gemm(name):
    recipe, state = decode_payload(golden(name), name)
    expected = trained(4)
    if name == "operation":
        expected = Fp8State({**expected.roles, "output": RoleState.fresh(4), "grad_input": RoleState.fresh(4)})
    assert recipe == DelayedScaling(amax_history_len=4)
    assert same(state, expected)


def test_no_bytes_at_all_are_no_state():
    assert decode_payload(b"", "empty") is None


@pytest.mark.parametrize("name", OTHERS)
def test_a_payload_of_something_else_than_one_gemm_is_not_understood_rather_than_damaged(name):
    with pytest.raises(NotUnderstood, match="FP8 state"):
        decode_payload(golden(name), name)


floats = st.floats(2.0**-100, 2.0**100, width=32)
amaxes = st.one_of(floats, st.sampled_from([0.0, float("inf"), 1e-45]))


@st.composite
def states(draw):
    recipe = DelayedScaling(
        margin=draw(st.integers(-4, 9)),
        fp8_format=draw(st.sampled_from(["HYBRID", "E4M3"])),
        amax_history_len=draw(st.sampled_from([1, 2, 3, 16, 1024])),
        amax_compute_algo=draw(st.sampled_from(["max", "most_recent"])),
        reduce_amax=draw(st.booleans()),
        fp8_dpa=draw(st.booleans()),
        fp8_mha=draw(st.booleans()),
    )
    roles = {}
    for role in ROLES:
        history = torch.zeros(recipe.amax_history_len)
        newest = draw(st.lists(amaxes, max_size=min(5, len(history))))
        history[len(history) - len(newest) :] = torch.tensor(newest)
        roles[role] = RoleState(torch.tensor(draw(floats)), history)
    return recipe, Fp8State(roles)


@settings(max_examples=40, deadline=None)
@given(states())
def test_what_is_written_reads_back_as_it_was(made):
    recipe, state = made
    again = decode_payload(encode_payload(state, recipe), "ours")
    assert again[0] == recipe
    assert same(again[1], state)


def test_equal_states_give_equal_bytes_wherever_their_tensors_lie():
    recipe, state = DelayedScaling(amax_history_len=4), trained(4)
    views = {
        role: RoleState(torch.stack([part.scale, part.scale])[1], part.amax_history.repeat(3).view(3, 4)[2])
        for role, part in state.roles.items()
    }
    assert encode_payload(state, recipe) == encode_payload(Fp8State(views), recipe)


def test_what_is_written_names_the_classes_that_te_s_own_payloads_name():
    def names(data):
        strings, found = [], set()
        for opcode, argument, _ in pickletools.genops(data):
            if "UNICODE" in opcode.name:
                strings.append(argument)
            elif opcode.name == "GLOBAL":
                found.add(argument)
            elif opcode.name == "STACK_GLOBAL" and len(strings) > 1:
                found.add(strings[-1])
        return {name.split()[-1] for name in found}

    ours = encode_payload(trained(4), DelayedScaling(amax_history_len=4))
    assert names(ours) == names(golden("linear"))


def test_a_state_of_another_length_than_its_recipe_is_not_written():
    with pytest.raises(PrecisionError, match=r"input has an amax history of shape \[4\]"):
        encode_payload(trained(4), DelayedScaling())


def altered(role, **change):
    state = trained(4)
    part = dataclasses.replace(state.roles[role], **change)
    return encode_payload(Fp8State({**state.roles, role: part}), DelayedScaling(amax_history_len=4))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_scale_that_cannot_be_one_is_damage(number):
    with pytest.raises(DamagedCheckpoint, match="not a positive finite number"):
        decode_payload(altered("grad_output", scale=torch.tensor(number)), "layer 3")


@pytest.mark.parametrize("number", [float("nan"), -1.0])
def test_an_amax_that_cannot_be_one_is_damage(number):
    with pytest.raises(DamagedCheckpoint, match="negative numbers or NaN"):
        decode_payload(altered("input", amax_history=torch.tensor([0.0, 1.0, number, 1.0])), "layer 3")


@pytest.mark.parametrize("name", [*RECIPES, *OTHER_FORMS, *OTHERS])
def test_a_payload_cut_off_anywhere_is_one_error(name):
    data = golden(name)
    for length in range(1, len(data), 7):
        with pytest.raises(DamagedCheckpoint, match="layer 3"):
            decode_payload(data[:length], "layer 3")


def test_numbers_of_a_big_endian_machine_are_refused_rather_than_read_backwards():
    little, big = (b"little_endianq\x02" + truth for truth in (b"\x88", b"\x89"))
    with pytest.raises(DamagedCheckpoint, match="not one that PyTorch wrote"):
        decode_payload(golden("linear").replace(little, big), "layer 3")


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 1798), byte=st.integers(0, 255))
def test_a_payload_with_any_byte_changed_reads_or_is_one_error(position, byte):
    data = bytearray(golden("linear"))
    data[position] = byte
    try:
        decode_payload(bytes(data), "layer 3")
    except PrecisionctlError as error:
        assert "layer 3" in str(error)


def attention(roles, history=4):
    numbers = {role: 2.0 ** (i + 1) for i, role in enumerate(roles)}
    return Fp8State({role: RoleState(torch.tensor(n), torch.arange(history) * n) for role, n in numbers.items()})


@pytest.mark.parametrize("roles", [ATTENTION_FORWARD + ATTENTION_BACKWARD, ("s", "d_p")])
def test_attention_reads_back_as_it_was_whole_and_where_only_the_softmax_is_delayed(roles):
    state, recipe = attention(roles), DelayedScaling(amax_history_len=4)
    decoded = decode_payload(encode_payload(state, recipe), "here")
    assert decoded is not None and decoded[0] == recipe
    assert same(decoded[1], state)


def test_attention_s_tensors_stand_in_the_columns_of_te_s_fused_attention():
    """META_QKV ... META_DP of cpp_extensions/fused_attn.py: forward 2, 3, 8 of 9; backward 0, 3, 5 of 6."""
    written = encode_payload(attention(ATTENTION_FORWARD + ATTENTION_BACKWARD), DelayedScaling(amax_history_len=4))
    seen = unpickled(written)
    assert seen["scale_fwd"].tolist() == [1, 1, 2, 8, 1, 1, 1, 1, 4]
    assert seen["scale_bwd"].tolist() == [32, 1, 1, 16, 1, 64]
    assert seen["amax_history_fwd"][3].tolist() == [0, 0, 6, 24, 0, 0, 0, 0, 12]
    assert seen["extra_fp8_variables"]["num_gemms"] == 3
