"""Payloads of Transformer Engine's own modules on a GPU: read here, written back, and taken up again."""

import pytest
import torch

from precisionctl.fp8 import grouped
from precisionctl.fp8.extra_state import decode_payload, read_payload
from precisionctl.fp8.extra_state_writer import encode_payload
from precisionctl.fp8.state import BACKWARD, FORWARD

try:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes
except (ImportError, RuntimeError, OSError):  # conftest.py skips everything, with the reason
    te = recipes = None

HISTORY = 4
GATE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def delayed(**fields):
    return recipes.DelayedScaling(amax_history_len=HISTORY, **fields)


def step(module, recipe, *inputs, seed=0, **arguments):
    """A forward and a backward pass; inputs are made of `seed`."""
    generator = torch.Generator(torch.empty(0, device="cuda").device).manual_seed(seed)
    made = [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for shape in inputs
    ]
    with te.autocast(enabled=True, recipe=recipe):
        out = module(*made, **arguments)
    out.float().square().mean().backward()
    return out.detach()


def payload_of(module):
    return module.get_extra_state().numpy().tobytes()


def taken_up(module, data):
    module.set_extra_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def assert_columns(state, meta, roles, places):
    """`roles` stand in TE's buffers at `places`."""
    for role, at in zip(roles, places, strict=True):
        assert torch.equal(state.roles[role].scale, meta.scale[at].cpu()), role
        assert torch.equal(state.roles[role].amax_history, meta.amax_history[:, at].cpu()), role


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_a_linear_s_payload_is_its_buffers_and_goes_on_as_te_s_own(kind, monkeypatch):
    monkeypatch.setenv(GATE, "1")
    recipe, shape = delayed(), (64, 256)
    module = getattr(te, kind)(256, 256, params_dtype=torch.bfloat16).cuda()
    for seed in range(6):
        step(module, recipe, shape, seed=seed)
    theirs = payload_of(module)
    found, state = decode_payload(theirs, kind)
    assert_columns(state, module.fp8_meta["scaling_fwd"], FORWARD, range(3))
    assert_columns(state, module.fp8_meta["scaling_bwd"], BACKWARD, range(2))
    assert not state.roles["output"].recorded and not state.roles["grad_input"].recorded
    assert state.roles["input"].recorded and state.roles["weight"].recorded and state.roles["grad_output"].recorded
    outcomes = []
    for data in (theirs, encode_payload(state, found)):
        again = getattr(te, kind)(256, 256, params_dtype=torch.bfloat16).cuda()
        again.load_state_dict({n: p for n, p in module.state_dict().items() if "_extra_state" not in n}, strict=False)
        taken_up(again, data)
        outcomes.append([step(again, recipe, shape, seed=seed) for seed in (6, 7)])
        outcomes[-1].append(decode_payload(payload_of(again), kind)[1].roles["input"].amax_history)
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_without_the_switch_te_refuses_what_it_wrote_itself(monkeypatch):
    monkeypatch.delenv(GATE, raising=False)
    module = te.Linear(256, 256, params_dtype=torch.bfloat16).cuda()
    step(module, delayed(), (64, 256))
    with pytest.raises(RuntimeError, match=GATE):
        taken_up(module, payload_of(module))


def test_a_grouped_linear_has_a_gemm_after_the_other_and_records_no_output(monkeypatch):
    monkeypatch.setenv(GATE, "1")
    recipe, gemms = delayed(), 3
    module = te.GroupedLinear(gemms, 256, 256, params_dtype=torch.bfloat16).cuda()
    for seed in range(5):
        step(module, recipe, (96, 256), seed=seed, m_splits=[32, 48, 16])
    data = payload_of(module)
    payload = read_payload(data, "grouped")
    assert payload.gemms == gemms and payload.order == "gemm"
    assert grouped.order_of(payload.directions, gemms, "here") == "gemm"  # the numbers alone say so too
    found, state = decode_payload(data, "grouped", of_group=True)
    for i in range(gemms):
        weight = getattr(module, f"weight{i}").abs().max().float().cpu()
        assert state.roles["weight"].amax_history[i, -1] == weight
    again = te.GroupedLinear(gemms, 256, 256, params_dtype=torch.bfloat16).cuda()
    taken_up(again, encode_payload(state, found))
    for key in ("scaling_fwd", "scaling_bwd"):
        for part in ("scale", "amax_history"):
            assert torch.equal(getattr(again.fp8_meta[key], part), getattr(module.fp8_meta[key], part))


def attention(recipe, steps=3):
    """Of heads of 128: others Hopper cannot train in FP8 (fused_attn.cpp, nvte_get_fused_attn_backend)."""
    module = te.DotProductAttention(4, 128, attention_dropout=0.0).cuda()
    for seed in range(steps):
        step(module, recipe, *[(128, 2, 4, 128)] * 3, seed=seed, attn_mask_type="causal", qkv_format="sbhd")
    return module


def test_attention_in_fp8_records_its_six_tensors_in_the_columns_that_are_read():
    module = attention(delayed(fp8_dpa=True))
    _, state = decode_payload(payload_of(module), "attention")
    assert_columns(state, module.fp8_meta["scaling_fwd"], ("qkv", "o", "s"), (2, 3, 8))
    assert_columns(state, module.fp8_meta["scaling_bwd"], ("d_qkv", "d_o", "d_p"), (0, 3, 5))
    assert {role for role, part in state.roles.items() if part.recorded} == {"qkv", "s", "o", "d_o", "d_qkv", "d_p"}


def test_attention_outside_fp8_keeps_columns_that_nothing_was_recorded_in():
    _, state = decode_payload(payload_of(attention(delayed())), "attention")
    assert not any(part.recorded for part in state.roles.values())


def test_attention_beside_current_scaling_keeps_the_softmax_alone(monkeypatch):
    """And TE cannot take up again what it saved: it makes nine columns ready for three. Before Blackwell it has no
    kernel for this attention, and computes it only where it is asked to emulate FP8."""
    monkeypatch.setenv(GATE, "1")
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    module = attention(recipes.Float8CurrentScaling(fp8_dpa=True))
    data = payload_of(module)
    found, state = decode_payload(data, "attention")
    assert state.roles.keys() == {"s", "d_p"}
    assert found.amax_history_len == len(module.fp8_meta["scaling_fwd"].amax_history)
    assert_columns(state, module.fp8_meta["scaling_fwd"], ("s",), (2,))
    assert_columns(state, module.fp8_meta["scaling_bwd"], ("d_p",), (1,))
    with pytest.raises(RuntimeError, match="size of tensor"):
        taken_up(te.DotProductAttention(4, 128, attention_dropout=0.0).cuda(), data)


@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "Float8BlockScaling"])
def test_recipes_without_state_leave_nothing(recipe):
    module = te.Linear(256, 256, params_dtype=torch.bfloat16).cuda()
    step(module, getattr(recipes, recipe)(), (128, 256))
    assert read_payload(payload_of(module), recipe) is None


def test_a_fused_operation_keeps_input_weight_and_grad_output():
    module = te.ops.Linear(256, 256, bias=False, device="cuda", dtype=torch.bfloat16)
    for seed in range(3):
        step(module, delayed(), (64, 256), seed=seed)
    data = next(value for name, value in module.state_dict().items() if name.endswith("0._extra_state"))
    _, state = decode_payload(data.numpy().tobytes(), "operation")
    assert {role for role, part in state.roles.items() if part.recorded} == {"input", "weight", "grad_output"}
