"""Emulated linears against float64 products of the codes, and their state against a slow port of TE's kernel."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from emulated_linears import IN, LARGEST, OUT, TOKENS, assert_rounded_once, backend_of, codes, delayed, randn
from te_kernels import fused_kernel_step
from torch import Tensor

from precisionctl.errors import PrecisionError
from precisionctl.fp8.state import ROLES, Fp8State, RoleState
from precisionctl.precision import PRESETS
from precisionctl.trainer.backends.base import Norm
from precisionctl.trainer.backends.emulated import EmulatedBackend, LayerNormLinear, Linear

RMS_NORM = Norm("RMSNorm", 1e-5)


SCALES = {"input": 37.0, "weight": 900.0, "grad_output": 5000.0}


def with_scales(linear: Linear) -> Linear:
    """Scales that are no powers of two, as if earlier steps had given them."""
    state = Fp8State.fresh(4)
    roles = {role: dataclasses.replace(state.roles[role], scale=torch.tensor(s)) for role, s in SCALES.items()}
    linear.set_fp8_state(Fp8State({**state.roles, **roles}))
    return linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fp8_format", ["HYBRID", "E4M3"])
def test_delayed_scaling_multiplies_codes_under_the_scales_it_had(
    dtype: torch.dtype, bias: bool, fp8_format: str
) -> None:
    backend = backend_of(delayed(fp8_format=fp8_format), dtype)
    linear = with_scales(backend.linear("linear", IN, OUT, bias))
    values, gradient = randn(TOKENS, IN, dtype=dtype, requires_grad=True), randn(TOKENS, OUT, dtype=dtype) / 100
    if linear.bias is not None:
        torch.nn.init.normal_(linear.bias)
    out = linear(values)
    out.backward(gradient)

    forward, backward = torch.float8_e4m3fn, torch.float8_e5m2 if fp8_format == "HYBRID" else torch.float8_e4m3fn
    x, w = codes(values, SCALES["input"], forward), codes(linear.weight, SCALES["weight"], forward)
    g = codes(gradient, SCALES["grad_output"], backward)
    inverse = {role: 1 / scale for role, scale in SCALES.items()}
    added = 0.0 if linear.bias is None else linear.bias.detach().bfloat16().double()
    assert out.dtype == values.grad.dtype == linear.weight.grad.dtype == dtype
    assert_rounded_once(out.detach(), x, w.t(), inverse["input"] * inverse["weight"], added)
    assert_rounded_once(values.grad, g, w, inverse["grad_output"] * inverse["weight"])
    assert_rounded_once(linear.weight.grad, g.t(), x, inverse["grad_output"] * inverse["input"])
    if linear.bias is not None:
        torch.testing.assert_close(linear.bias.grad, gradient.double().sum(0).to(dtype))


def test_current_scaling_multiplies_codes_under_each_tensors_own_scale() -> None:
    linear = backend_of(PRESETS["fp8-current"]).linear("linear", IN, OUT, True)
    values, gradient = randn(TOKENS, IN, requires_grad=True), randn(TOKENS, OUT) / 100
    out = linear(values)
    out.backward(gradient)

    def own(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
        scale = float(np.float32(LARGEST[dtype]) / np.float32(tensor.detach().float().abs().max()))
        return codes(tensor, scale, dtype), 1 / scale

    (x, x_inv), (w, w_inv) = own(values, torch.float8_e4m3fn), own(linear.weight, torch.float8_e4m3fn)
    g, g_inv = own(gradient, torch.float8_e5m2)
    assert_rounded_once(out.detach(), x, w.t(), x_inv * w_inv, linear.bias.detach().double())
    assert_rounded_once(values.grad, g, w, g_inv * w_inv)
    assert_rounded_once(linear.weight.grad, g.t(), x, g_inv * x_inv)
    assert linear.fp8_state() is None


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("history", "margin"), [(1, 0), (5, 0), (5, 2)])
def test_state_over_fifty_random_steps_is_that_of_the_slow_port_to_the_bit(
    algorithm: str, history: int, margin: int
) -> None:
    backend = backend_of(delayed(amax_history_len=history, margin=margin, amax_compute_algo=algorithm))
    linear = backend.linear("linear", IN, OUT, False)
    rows = {role: [np.float32(0)] * history for role in SCALES}
    scales = dict.fromkeys(SCALES, np.float32(1))
    for step in range(50):
        values, gradient = (randn(16, size) * 10 ** float(torch.randn(())) for size in (IN, OUT))
        gradient *= step % 7 != 3  # a step whose gradient is zero leaves its row out
        with torch.no_grad():
            linear.weight.mul_(1 + 0.1 * torch.randn(()))
        with backend.forward_pass():
            out = linear(values)
        out.backward(gradient)
        backend.after_backward()
        for role, tensor in (("input", values), ("weight", linear.weight), ("grad_output", gradient)):
            rows[role][0] = np.float32(tensor.detach().float().abs().max())
            largest = 57344.0 if role == "grad_output" else 448.0
            scales[role] = fused_kernel_step(rows[role], scales[role], largest, margin, algorithm)
            state = linear.fp8_state().roles[role]
            assert state.scale.numpy().tobytes() == scales[role].tobytes()
            assert state.amax_history.numpy().tobytes() == np.array(rows[role]).tobytes()


def test_in_bf16_gradients_are_those_of_a_plain_linear() -> None:
    linear = backend_of(PRESETS["bf16"]).linear("linear", IN, OUT, True)
    values, gradient = randn(3, 5, IN, requires_grad=True), randn(3, 5, OUT)
    linear(values).backward(gradient)
    plain = [t.detach().clone().requires_grad_() for t in (values, linear.weight, linear.bias)]
    F.linear(*plain).backward(gradient)
    for ours, theirs in zip((values, linear.weight, linear.bias), plain, strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_layer_norm_linear_in_bf16_is_rms_norm_and_a_linear() -> None:
    linear = backend_of(PRESETS["bf16"], torch.float32).layer_norm_linear("linear", IN, OUT, False, RMS_NORM, None)
    torch.nn.init.normal_(linear.layer_norm_weight)
    values = randn(TOKENS, IN, dtype=torch.float32)
    expected = F.linear(F.rms_norm(values, (IN,), linear.layer_norm_weight, 1e-5), linear.weight)
    torch.testing.assert_close(linear(values), expected)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_each_norm_is_torch_s_own_alone_and_before_a_linear(kind: str, zero_centered: bool) -> None:
    backend, norm = backend_of(PRESETS["bf16"], torch.float32), Norm(kind, 1e-3, zero_centered)
    linear, alone = backend.layer_norm_linear("linear", IN, OUT, True, norm, None), backend.norm(IN, norm)
    values = randn(TOKENS, IN, dtype=torch.float32) + 0.3
    plain = F.layer_norm(values, (IN,), eps=1e-3) if kind == "LayerNorm" else F.rms_norm(values, (IN,), eps=1e-3)
    torch.testing.assert_close(alone(values), plain)  # a fresh norm multiplies by one
    multiplier, shift = torch.randn(IN), torch.randn(IN) if kind == "LayerNorm" else torch.zeros(IN)
    state = {"weight": multiplier - 1 if zero_centered else multiplier, "bias": shift}
    if kind == "RMSNorm":
        del state["bias"]
    alone.load_state_dict(state)
    names = {f"layer_norm_{name}": value for name, value in state.items()}
    linear.load_state_dict({**linear.state_dict(), **names})
    expected = plain * multiplier + shift
    torch.testing.assert_close(alone(values), expected)
    torch.testing.assert_close(linear(values), F.linear(expected, linear.weight, linear.bias))


@pytest.mark.parametrize("bias", [False, True])
def test_a_grouped_linear_is_each_expert_s_own_for_its_tokens(bias: bool) -> None:
    grouped = backend_of(PRESETS["bf16"], torch.float32).grouped_linear("experts", 4, IN, OUT, bias, None)
    for parameter in grouped.parameters():
        torch.nn.init.normal_(parameter)
    assert [name for name, _ in grouped.named_parameters() if "bias" in name] == [f"bias{i}" for i in range(4 * bias)]
    counts = [3, 0, 1, 7]
    values = randn(sum(counts), IN, dtype=torch.float32)
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    state = grouped.state_dict()
    expected = [F.linear(v, state[f"weight{e}"], state.get(f"bias{e}")) for v, e in zip(values, experts, strict=True)]
    out = grouped(values, counts)
    torch.testing.assert_close(out, torch.stack(expected))
    out.sum().backward()
    assert not grouped.get_parameter("weight1").grad.any(), "zero, and there: no token was its"


def norm_in_fp32(linear: LayerNormLinear, values: Tensor) -> Tensor:
    return F.rms_norm(values.float(), (IN,), linear.layer_norm_weight.detach().float(), linear.norm.epsilon)


def test_delayed_scaling_casts_the_norm_before_it_is_rounded_and_current_scaling_after() -> None:
    """As TE's normalization.cpp does: only the kernel of delayed scaling writes FP8 itself."""
    values = randn(TOKENS, IN)
    scale = 37.0
    results = {}
    for preset in ("fp8-delayed", "fp8-current"):
        backend = backend_of(PRESETS[preset])
        linear = backend.layer_norm_linear("linear", IN, IN, False, RMS_NORM, None)
        torch.nn.init.normal_(linear.layer_norm_weight, generator=torch.Generator().manual_seed(0))
        if preset == "fp8-delayed":
            linear.set_fp8_state(Fp8State({r: RoleState(torch.tensor(scale), torch.zeros(4)) for r in ROLES}))
        with torch.no_grad():
            linear.weight.copy_(torch.eye(IN))
        results[preset] = linear, linear(values)
    linear, out = results["fp8-delayed"]
    wide = norm_in_fp32(linear, values)
    state = linear.fp8_state().roles["input"]
    torch.testing.assert_close(state.amax_history[0], wide.abs().max(), rtol=2**-22, atol=0)
    assert state.amax_history[0] != wide.bfloat16().abs().max()
    one = codes(torch.eye(IN), scale, torch.float8_e4m3fn)
    assert_rounded_once(out.detach(), codes(wide, scale, torch.float8_e4m3fn), one.t(), 1 / scale**2)
    linear, out = results["fp8-current"]
    rounded = norm_in_fp32(linear, values).bfloat16()
    own = float(np.float32(448) / np.float32(rounded.float().abs().max()))
    identity = codes(torch.eye(IN), 448.0, torch.float8_e4m3fn)
    assert_rounded_once(out.detach(), codes(rounded, own, torch.float8_e4m3fn), identity.t(), 1 / own / 448)


def test_the_gradient_of_the_norm_is_taken_at_the_rounded_gradient_of_the_gemm() -> None:
    backend = backend_of(delayed())
    linear = with_scales(backend.layer_norm_linear("linear", IN, OUT, False, RMS_NORM, None))
    values, gradient = randn(TOKENS, IN, requires_grad=True), randn(TOKENS, OUT) / 100
    linear(values).backward(gradient)
    g, w = codes(gradient, 5000.0, torch.float8_e5m2), codes(linear.weight, 900.0, torch.float8_e4m3fn)
    inner = (g @ w / 5000.0 / 900.0).bfloat16().float()
    plain = values.detach().float().requires_grad_()
    F.rms_norm(plain, (IN,), linear.layer_norm_weight.detach().float(), 1e-5).backward(inner)
    # FP32 sums in another order hardly ever round to another value; three tenths would differ if gradients were not
    # rounded between the GEMM and the norm (measured).
    assert (values.grad == plain.grad.bfloat16()).float().mean() > 0.99


def state_of(value: float, history: int) -> Fp8State:
    return Fp8State(
        {role: RoleState(torch.tensor(value + i), torch.arange(history) * (value + i)) for i, role in enumerate(ROLES)}
    )


def test_state_that_was_set_is_given_back_role_by_role() -> None:
    backend = backend_of(delayed())
    first, second = (backend.linear(name, IN, OUT, False) for name in ("first", "second"))
    for linear, value in ((first, 2.0), (second, 20.0)):
        linear.set_fp8_state(state_of(value, 4))
    for linear, value in ((first, 2.0), (second, 20.0)):
        for role, expected in state_of(value, 4).roles.items():
            torch.testing.assert_close(linear.fp8_state().roles[role].scale, expected.scale, rtol=0, atol=0)
            torch.testing.assert_close(
                linear.fp8_state().roles[role].amax_history, expected.amax_history, rtol=0, atol=0
            )


def test_a_shorter_history_keeps_the_newest_rows() -> None:
    linear = backend_of(delayed(amax_history_len=3)).linear("linear", IN, OUT, False)
    linear.set_fp8_state(state_of(1.0, 8))
    assert linear.fp8_state().roles["input"].amax_history.tolist() == [0, 6, 7]


def test_a_state_given_away_does_not_change_with_the_next_step() -> None:
    backend = backend_of(delayed())
    linear = backend.linear("linear", IN, OUT, False)
    before = linear.fp8_state()
    with backend.forward_pass():
        linear(randn(TOKENS, IN))
    assert not before.roles["input"].recorded
    assert linear.fp8_state().roles["input"].recorded


def test_roles_that_no_gemm_uses_keep_their_state() -> None:
    backend = backend_of(delayed())
    linear = backend.linear("linear", IN, OUT, False)
    linear.set_fp8_state(state_of(3.0, 4))
    with backend.forward_pass():
        out = linear(randn(TOKENS, IN))
    out.backward(randn(TOKENS, OUT))
    backend.after_backward()
    for role in ("output", "grad_input"):
        kept, expected = linear.fp8_state().roles[role], state_of(3.0, 4).roles[role]
        assert kept.scale == expected.scale
        assert torch.equal(kept.amax_history, expected.amax_history)


@pytest.mark.parametrize("preset", ["bf16", "fp8-current"])
def test_a_gemm_without_state_refuses_one(preset: str) -> None:
    linear = backend_of(PRESETS[preset]).linear("decoder.layers.0.mlp.linear_fc2", IN, OUT, False)
    with pytest.raises(PrecisionError, match="linear_fc2"):
        linear.set_fp8_state(Fp8State.fresh(4))


@pytest.mark.parametrize(
    "attempt",
    [
        lambda backend: backend.linear("odd", IN + 8, OUT, False),
        lambda backend: backend.layer_norm_linear("odd", IN, OUT + 1, False, RMS_NORM, None),
        lambda backend: backend.linear("odd", IN, OUT, False)(randn(TOKENS - 8, IN)),
    ],
    ids=["in", "out", "tokens"],
)
def test_sizes_that_an_fp8_gemm_cannot_have_are_refused(attempt: Callable[[EmulatedBackend], object]) -> None:
    with pytest.raises(PrecisionError, match="multiples of 16.*odd"):
        attempt(backend_of(delayed()))


def test_values_beyond_the_scale_saturate_and_their_amax_is_remembered() -> None:
    backend = backend_of(delayed())
    linear = backend.linear("linear", 16, 16, False)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(16))
    values = torch.full((16, 16), 1000.0, dtype=torch.bfloat16)
    with backend.forward_pass():
        out = linear(values)
    assert out.eq(448).all()
    state = linear.fp8_state().roles["input"]
    assert state.amax_history.tolist() == [0, 0, 0, 1000]
    assert math.isclose(float(state.scale), 0.448, rel_tol=2**-23)
