"""Emulated experts: each is the emulated linear of its own tokens and its own state, to the last bit."""

import dataclasses

import pytest
import torch
from emulated_linears import IN, OUT, backend_of, delayed, randn
from te_states import same, trained
from torch import Tensor

from precisionctl.errors import PrecisionError
from precisionctl.fp8.state import Fp8State, RoleState
from precisionctl.precision import PRESETS, Precision
from precisionctl.trainer.backends.emulated import EmulatedBackend, GroupedLinear, Linear
from precisionctl.trainer.backends.recorder import Recorder

NAME = "decoder.layers.0.mlp.experts.linear_fc1"
COUNTS = [32, 0, 16, 48]
EXPERTS = len(COUNTS)
KEPT = dataclasses.replace(PRESETS["fp8-delayed"], keep_bf16=("decoder.layers.*.mlp.experts.*",))


def of(expert: int, history: int) -> Fp8State:
    """No two experts and no two roles have a number in common."""
    roles = trained(history).roles
    factor = 1 + expert / 16
    return Fp8State({role: RoleState(part.scale * factor, part.amax_history * factor) for role, part in roles.items()})


def pair(precision: Precision, bias: bool) -> tuple[EmulatedBackend, GroupedLinear, EmulatedBackend, list[Linear]]:
    """A grouped linear, and linears of the same weights, biases and states in another backend."""
    backend, alone = backend_of(precision), backend_of(precision)
    grouped = backend.grouped_linear(NAME, EXPERTS, IN, OUT, bias, None)
    linears = [alone.linear(f"expert {expert}", IN, OUT, bias) for expert in range(EXPERTS)]
    if grouped.fp8_state():
        states = [of(expert, 4) for expert in range(EXPERTS)]
        grouped.set_fp8_state(Fp8State.of_experts(states))
        for linear, state in zip(linears, states, strict=True):
            linear.set_fp8_state(state)
    for expert, linear in enumerate(linears):
        for name, values in linear.named_parameters():
            torch.nn.init.normal_(grouped.get_parameter(f"{name}{expert}"))
            values.data.copy_(grouped.get_parameter(f"{name}{expert}"))
    return backend, grouped, alone, linears


def step(backend: EmulatedBackend, modules: list, inputs: list, gradients: list) -> list[Tensor]:
    with backend.forward_pass():
        outs = [module(*arguments) for module, arguments in zip(modules, inputs, strict=True)]
    for out, gradient in zip(outs, gradients, strict=True):
        out.backward(gradient)
    backend.after_backward()
    return outs


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_experts_are_linears_of_their_own_tokens_and_states_to_the_last_bit(scaling: str, bias: bool) -> None:
    precision = delayed() if scaling == "delayed" else PRESETS["fp8-current"]
    backend, grouped, alone, linears = pair(precision, bias)
    for _ in range(6):  # longer than the history
        values, gradient = randn(sum(COUNTS), IN), randn(sum(COUNTS), OUT) / 100
        parts = [part.clone().requires_grad_() for part in values.split(COUNTS)]
        values.requires_grad_()
        (out,) = step(backend, [grouped], [(values, COUNTS)], [gradient])
        outs = step(alone, linears, [(part,) for part in parts], list(gradient.split(COUNTS)))
        assert torch.equal(out, torch.cat(outs))
        assert torch.equal(values.grad, torch.cat([part.grad for part in parts]))
        for expert, linear in enumerate(linears):
            for name, parameter in linear.named_parameters():
                assert torch.equal(grouped.get_parameter(f"{name}{expert}").grad, parameter.grad), (name, expert)
            if scaling == "delayed":
                assert same(grouped.fp8_state().of_expert(expert), linear.fp8_state()), expert


def test_a_pass_in_bf16_records_of_each_expert_what_one_in_fp8_does() -> None:
    backend, grouped, _, _ = pair(delayed(), False)
    grouped.set_fp8_state(Fp8State.fresh(4, (EXPERTS,)))
    values, gradient = randn(sum(COUNTS), IN, requires_grad=True), randn(sum(COUNTS), OUT)
    backend.recorder = recorder = Recorder(delayed(), torch.device("cpu"))
    with recorder.forward_pass():
        grouped(values, COUNTS).backward(gradient)
    recorder.after_backward()
    backend.recorder = None
    assert not grouped.fp8_state().roles["input"].recorded
    step(backend, [grouped], [(values, COUNTS)], [gradient])
    assert same(grouped.fp8_state(), recorder.states()[NAME])


def test_an_expert_without_tokens_keeps_what_it_knows_of_them_and_learns_its_weight_s() -> None:
    backend, grouped, _, _ = pair(delayed(), False)
    before = grouped.fp8_state()
    step(backend, [grouped], [(randn(sum(COUNTS), IN, requires_grad=True), COUNTS)], [randn(sum(COUNTS), OUT)])
    after = grouped.fp8_state()
    for role in ("input", "grad_output"):
        unchanged = (after.roles[role].amax_history == before.roles[role].amax_history).all(-1)
        assert unchanged.tolist() == [count == 0 for count in COUNTS]
        assert after.roles[role].scale[1] == before.roles[role].scale[1]
    assert (after.roles["weight"].amax_history != before.roles["weight"].amax_history).any(-1).all()


def test_rows_of_zeros_as_te_pads_with_change_neither_state_nor_result() -> None:
    """Why experts need no alignment here, though an FP8 GEMM on a GPU does."""
    counts = [3, 0, 17, 1]
    backend, grouped, alone, linears = pair(delayed(), False)
    values, gradient = randn(sum(counts), IN, requires_grad=True), randn(sum(counts), OUT) / 100
    (out,) = step(backend, [grouped], [(values, counts)], [gradient])

    def padded(tensor: Tensor) -> list[Tensor]:
        return [torch.cat([part, part.new_zeros(-len(part) % 16, part.shape[1])]) for part in tensor.split(counts)]

    outs = step(alone, linears, [(part,) for part in padded(values.detach())], padded(gradient))
    kept = [part[:count] for part, count in zip(outs, counts, strict=True)]
    torch.testing.assert_close(out, torch.cat(kept), rtol=2**-7, atol=0)  # sums of FP32 in another order, rounded
    assert (out == torch.cat(kept)).float().mean() > 0.99
    for expert, linear in enumerate(linears):
        assert same(grouped.fp8_state().of_expert(expert), linear.fp8_state())
        ours, theirs = grouped.get_parameter(f"weight{expert}").grad, linear.weight.grad
        assert (ours == theirs).float().mean() > 0.99


def test_state_of_experts_is_given_back_and_a_shorter_history_keeps_the_newest_rows() -> None:
    grouped = backend_of(delayed(amax_history_len=3)).grouped_linear(NAME, EXPERTS, IN, OUT, False, None)
    state = Fp8State.of_experts([of(expert, 8) for expert in range(EXPERTS)])
    grouped.set_fp8_state(state)
    for role, part in grouped.fp8_state().roles.items():
        assert torch.equal(part.scale, state.roles[role].scale)
        assert torch.equal(part.amax_history[:, 1:], state.roles[role].amax_history[:, -2:])


@pytest.mark.parametrize("precision", [PRESETS["bf16"], PRESETS["fp8-current"], KEPT])
def test_experts_that_keep_no_state_refuse_one(precision: Precision) -> None:
    grouped = backend_of(precision).grouped_linear(NAME, EXPERTS, IN, OUT, False, None)
    assert grouped.fp8_state() is None
    with pytest.raises(PrecisionError, match=r"keeps no FP8 state .*experts.linear_fc1"):
        grouped.set_fp8_state(Fp8State.of_experts([trained(4)] * EXPERTS))


def test_weights_that_an_fp8_gemm_cannot_take_are_refused() -> None:
    with pytest.raises(PrecisionError, match=r"80 by 24.*experts.linear_fc1"):
        backend_of(delayed()).grouped_linear(NAME, EXPERTS, 24, OUT, False, None)


def test_what_one_expert_sees_no_other_does() -> None:
    """An amax a thousand times larger stays with its own expert."""
    backend, grouped, _, _ = pair(delayed(), False)
    grouped.set_fp8_state(Fp8State.fresh(4, (EXPERTS,)))
    values = torch.ones(sum(COUNTS), IN, dtype=torch.bfloat16)
    values[-1] = 1000
    with backend.forward_pass():
        grouped(values, COUNTS)
    recorded = grouped.fp8_state().roles["input"].amax_history[:, -1]
    assert recorded.tolist() == [1, 0, 1, 1000]
    assert grouped.fp8_state().roles["input"].scale.tolist() == [448, 1, 448, pytest.approx(0.448)]
