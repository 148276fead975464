"""What we believe of Transformer Engine from its source: the rows of docs/scales.md, "What has been proved"."""

import pickle

import pytest
import torch
from te_pairs import state_of

from precisionctl.fp8.extra_state import decode_payload
from precisionctl.fp8.extra_state_writer import encode_payload
from precisionctl.fp8.state import ROLES, DelayedScaling

try:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch.optimizers import FusedAdam
except (ImportError, RuntimeError, OSError):  # conftest.py skips everything, with the reason
    te = recipes = FusedAdam = None

SIZE = 256


@pytest.fixture(autouse=True)
def gate_open(monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")


def delayed(history=4, **fields):
    return recipes.DelayedScaling(amax_history_len=history, **fields)


def linear(kind="Linear", *sizes):
    return getattr(te, kind)(*(sizes or (SIZE, SIZE)), params_dtype=torch.bfloat16, device="cuda")


def values(scale=1.0):
    return (torch.randn(64, SIZE, device="cuda") * scale).bfloat16()


def step(module, recipe, x=None, **arguments):
    x = values() if x is None else x
    with te.autocast(enabled=True, recipe=recipe):
        out = module(x.detach().requires_grad_(), **arguments)
    out.float().square().mean().backward()
    return out.detach()


def load(module, payload):
    module.set_extra_state(torch.frombuffer(bytearray(payload), dtype=torch.uint8))


def forward_of(module):
    return module.fp8_meta["scaling_fwd"]


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_calibrating_records_nothing_in_a_linear(kind):
    module, recipe = linear(kind), delayed()
    with torch.no_grad(), te.autocast(enabled=False, calibrating=True, recipe=recipe):
        module(values())
    assert forward_of(module).amax_history.count_nonzero() == 0
    assert (forward_of(module).scale == 1).all()


def test_calibrating_leaves_an_mlp_the_last_batch_in_row_0_and_no_scale():
    kind = {"activation": "relu", "bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
    module, recipe = te.LayerNormMLP(SIZE, SIZE, **kind), delayed()
    with torch.no_grad(), te.autocast(enabled=False, calibrating=True, recipe=recipe):
        for scale in (100.0, 1.0):
            module(values(scale))
    meta = forward_of(module)
    assert meta.amax_history[1:].count_nonzero() == 0
    assert [bool(amax) for amax in meta.amax_history[0]] == [True, True, False] * 2  # inputs and weights, no outputs
    assert meta.amax_history[0, 1] == module.fc1_weight.abs().max()
    assert (meta.scale == 1).all()


def test_calibrating_fails_in_a_grouped_linear():
    module = te.GroupedLinear(2, SIZE, SIZE, params_dtype=torch.bfloat16, device="cuda")
    with pytest.raises(AttributeError, match="calibrate"), torch.no_grad():
        with te.autocast(enabled=False, calibrating=True, recipe=delayed()):
            module(values(), m_splits=[32, 32])


@pytest.mark.parametrize(("before", "after"), [(8, 4), (4, 8)])
def test_te_keeps_the_oldest_rows_of_a_history_that_gets_shorter_and_pads_at_the_newest(before, after):
    """We do the other way around: the newest rows are kept."""
    recipe, module = DelayedScaling(amax_history_len=before), linear()
    load(module, encode_payload(state_of(before), recipe))
    assert len(forward_of(module).amax_history) == before, "the checkpoint's recipe counts first"
    held = forward_of(module).amax_history.clone()
    with te.autocast(enabled=True, recipe=delayed(after)):
        module.init_fp8_metadata()
        found = forward_of(module).amax_history
        kept = min(before, after)
        assert torch.equal(found[:kept], held[:kept])
        assert found[kept:].count_nonzero() == 0
    ours = state_of(before).roles["input"].resized(after).amax_history
    assert ours[-1] == held[-1, 0]


def test_an_empty_state_leaves_a_module_as_it_starts():
    module = linear()
    module.set_extra_state(torch.empty(0, dtype=torch.uint8))
    step(module, delayed())
    used = forward_of(module)
    assert used.amax_history[-1, :2].count_nonzero() == 2
    assert used.amax_history[1:-1].count_nonzero() == 0


def test_the_first_step_without_a_state_casts_with_scale_1():
    """1e-4 is far below what E4M3 can hold; it is lost, and the next step has a scale for it."""
    module, recipe = linear(), delayed()
    small = torch.full((64, SIZE), 1e-4, device="cuda", dtype=torch.bfloat16)
    assert step(module, recipe, small).abs().max() == 0
    assert step(module, recipe, small).abs().max() > 0


@pytest.mark.parametrize("history", [1, 16])
def test_a_payload_of_1_x_is_loaded_under_the_default_recipe(history):
    recipe, module = DelayedScaling(amax_history_len=history), linear()
    payload = encode_payload(state_of(history), recipe, te=1)
    if history == 1:
        load(module, payload)
        assert len(forward_of(module).amax_history) == 1024
        assert torch.equal(forward_of(module).scale.cpu(), torch.tensor([1.5, 2.5, 3.5]))
    else:
        with pytest.raises(RuntimeError, match="size of tensor"):
            load(module, payload)


def test_a_payload_of_1_6_freezes_the_scales():
    """Its `buffer_index_and_autocast_key` tells TE that the module is registered already."""
    recipe, module = delayed(), linear()
    step(module, recipe)
    state = pickle.loads(module.get_extra_state().numpy().tobytes())
    state["extra_fp8_variables"]["buffer_index_and_autocast_key"] = [0, "forward_x", 0, "backward_x"]
    again = linear()
    load(again, pickle.dumps(state))
    before = forward_of(again).scale.clone()
    for _ in range(3):
        step(again, recipe, values(1000.0))
    assert torch.equal(forward_of(again).scale, before)


def test_a_run_in_bf16_saves_the_state_until_its_first_step():
    recipe, module = DelayedScaling(amax_history_len=4), linear()
    load(module, encode_payload(state_of(4), recipe))
    decoded = decode_payload(module.get_extra_state().numpy().tobytes(), "linear")
    assert decoded is not None
    assert torch.equal(decoded[1].roles["input"].amax_history, state_of(4).roles["input"].amax_history)
    module(values().requires_grad_())
    assert module.get_extra_state().numel() == 0


def test_an_infinite_amax_freezes_the_scale_until_it_leaves_the_history():
    module, recipe, scales = linear(), delayed(4), []
    for scale in (1.0, torch.inf, 1.0, 1.0, 1.0, 5.0):
        step(module, recipe, torch.full((64, SIZE), scale, device="cuda", dtype=torch.bfloat16))
        scales.append(forward_of(module).scale[0].item())
    assert scales[1:4] == [scales[0]] * 3
    assert scales[-1] == pytest.approx(448 / 5)


def adam(values, gradient, steps=1):
    parameter = torch.nn.Parameter(values.clone())
    kinds = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16, "master_weight_dtype": torch.float16}
    optimizer = FusedAdam([parameter], lr=1e-2, master_weights=True, **kinds)
    for _ in range(steps):
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter, optimizer


def test_fused_adam_makes_nan_of_a_first_moment_in_fp8_that_is_all_zero():
    """Its scale is 1 / (0 / 448), and 0 times infinity is not a number: a parameter without gradient is lost. Once; in
    the next step it reads NaN back."""
    start = torch.ones(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    parameter, optimizer = adam(start, torch.zeros_like(start), steps=2)
    assert optimizer.state_dict()["state"][0]["exp_avg"].isnan().all()
    assert parameter.isnan().all()


def test_fused_adam_saves_moments_of_any_dtype_in_fp32_and_unscaled():
    gradient = torch.linspace(0.1, 1, SIZE * SIZE, device="cuda").view(SIZE, SIZE).bfloat16()
    _, optimizer = adam(torch.ones_like(gradient), gradient)
    saved = optimizer.state_dict()["state"][0]
    assert {name: part.dtype for name, part in saved.items()} == dict.fromkeys(saved, torch.float32)
    torch.testing.assert_close(saved["exp_avg"], 0.1 * gradient.float(), rtol=0.07, atol=0)
    torch.testing.assert_close(saved["exp_avg_sq"], 1e-3 * gradient.float().square(), rtol=2e-3, atol=0)
    assert optimizer.param_groups[0]["step"] == 1


def test_fp8_weights_are_cast_with_scale_1_where_no_state_came_first():
    """Small weights then are E4M3's subnormal numbers, or nothing."""
    with te.quantized_model_init(enabled=True, recipe=delayed()):
        module = linear()
    small = torch.full((SIZE, SIZE), 1e-3, device="cuda", dtype=torch.bfloat16)
    module.load_state_dict({"weight": small, "bias": torch.zeros(SIZE, device="cuda")}, strict=False)
    held = module.weight.detach().dequantize().float()
    assert held.unique().tolist() == [2.0**-9]  # 0.00195: E4M3's smallest, twice the weight


@pytest.mark.parametrize("history", [1, 4, 1024])
def test_what_we_write_te_loads_and_what_it_then_writes_we_read(history):
    recipe, module = DelayedScaling(amax_history_len=history), linear("LayerNormLinear")
    load(module, encode_payload(state_of(history), recipe))
    decoded = decode_payload(module.get_extra_state().numpy().tobytes(), "linear")
    assert decoded is not None
    found, state = decoded
    assert found == recipe
    for role in ROLES:
        assert torch.equal(state.roles[role].scale, state_of(history).roles[role].scale), role
        assert torch.equal(state.roles[role].amax_history, state_of(history).roles[role].amax_history), role
