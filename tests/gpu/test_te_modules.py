"""Transformer Engine's linears and norms against the emulation's, on a GPU that has FP8."""

import pytest
import torch
from te_pairs import (
    BF16_SQNR,
    EVERY_PRESET,
    FP8_SQNR,
    IN,
    OUT,
    RECIPES,
    USED,
    assert_same,
    batch,
    least_sqnr,
    make,
    pair,
    sqnr,
    state_of,
    step,
)

from precisionctl.codes import numerics
from precisionctl.errors import PrecisionError
from precisionctl.fp8 import delayed_scaling
from precisionctl.fp8.extra_state import decode_payload
from precisionctl.fp8.extra_state_writer import encode_payload
from precisionctl.fp8.state import Fp8State
from precisionctl.precision import PRESETS, Precision
from precisionctl.trainer.backends.base import Norm
from precisionctl.trainer.backends.choose import make_backend
from precisionctl.trainer.backends.recorder import Recorder


@pytest.mark.parametrize("kind", ["linear", "layer_norm_linear", "layer_norm_1p_linear"])
@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_outputs_and_gradients_agree_within_the_accumulation_of_the_gemm(kind: str, preset: str) -> None:
    (te_backend, te_module), (backend, module) = pair(PRESETS[preset], kind)
    for _ in range(3):
        values, gradient = batch()
        theirs, ours = step(te_backend, te_module, values, gradient), step(backend, module, values, gradient)
        assert theirs.keys() == ours.keys()
        for name in ours:
            assert theirs[name].dtype == ours[name].dtype
            assert sqnr(theirs[name], ours[name]) > least_sqnr(preset, name), name


@pytest.mark.parametrize("norm", [Norm(k, 1e-5, z) for k in ("RMSNorm", "LayerNorm") for z in (False, True)], ids=str)
def test_norms_agree(norm: Norm) -> None:
    backends = [make_backend(n, PRESETS["bf16"], torch.bfloat16, torch.device("cuda")) for n in ("te", "emulated")]
    theirs, ours = (backend.norm(IN, norm) for backend in backends)
    theirs.load_state_dict({name: torch.randn_like(p) for name, p in ours.named_parameters()})
    ours.load_state_dict(theirs.state_dict())
    values = batch()[0]
    assert sqnr(theirs(values), ours(values)) > BF16_SQNR


@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_grouped_linears_agree_and_an_expert_without_tokens_keeps_its_state(preset: str) -> None:
    counts, made = [100, 0, 1, 155], []
    values, gradient = (torch.randn(256, size, device="cuda").bfloat16() for size in (IN, OUT))
    for name in ("te", "emulated"):
        backend = make_backend(name, PRESETS[preset], torch.bfloat16, torch.device("cuda"))
        module = backend.grouped_linear("decoder.layers.0.mlp.experts.linear_fc1", 4, IN, OUT, True, None)
        if made:
            module.load_state_dict(made[0][0].state_dict())
        with backend.forward_pass():
            out = module(values, counts)
        out.backward(gradient)
        backend.after_backward()
        made.append((module, out))
    (theirs, their_out), (ours, our_out) = made
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    assert sqnr(their_out, our_out) > FP8_SQNR
    for name, one in theirs.named_parameters():
        near = sqnr(one.grad, ours.get_parameter(name).grad) > least_sqnr(preset, name)
        assert near or name in ("weight1", "bias1"), name
    if preset != "fp8-delayed":
        assert theirs.fp8_state() is None
        return
    assert_same(theirs.fp8_state(), ours.fp8_state())
    kept = theirs.fp8_state().roles
    assert (
        kept["input"].amax_history[:, -1].count_nonzero()
        == kept["grad_output"].amax_history[:, -1].count_nonzero()
        == 3
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_and_histories_follow_from_the_amaxes_to_the_bit(recipe: str) -> None:
    """TE's state after each step is what `update_delayed` makes of the amax that TE recorded in it."""
    precision = Precision(fp8=True, delayed=RECIPES[recipe])
    (te_backend, te_module), (backend, module) = pair(precision, "linear")
    expected = te_module.fp8_state()
    for size in (1.0, 3.0, 0.0, 0.01, 100.0, 1.0, 7.0, 0.5, 2.0, 2.0, 0.1, 30.0):
        values, gradient = batch(size)
        step(te_backend, te_module, values, gradient)
        step(backend, module, values, gradient)
        amaxes = {"input": values, "weight": te_module.weight, "grad_output": gradient}
        roles = dict(expected.roles)
        for role, tensor in amaxes.items():
            roles[role].amax_history[0] = numerics.amax(tensor).cpu()
            roles[role] = delayed_scaling.update_delayed(roles[role], RECIPES[recipe].dtype(role), RECIPES[recipe])
        expected = Fp8State(roles)
        assert_same(te_module.fp8_state(), expected)
        assert_same(module.fp8_state(), expected)


def test_the_norm_s_amax_is_taken_before_rounding() -> None:
    (te_backend, te_module), (backend, module) = pair(PRESETS["fp8-delayed"], "layer_norm_linear")
    values, gradient = batch()
    step(te_backend, te_module, values, gradient)
    step(backend, module, values, gradient)
    theirs, ours = (m.fp8_state().roles["input"].amax_history[-1] for m in (te_module, module))
    torch.testing.assert_close(theirs, ours, rtol=2**-20, atol=0)
    assert theirs != theirs.bfloat16()


def test_two_micro_batches_are_two_rows() -> None:
    backend, module = make("te", Precision(fp8=True, delayed=RECIPES["max"]), "linear")
    for _ in range(2):
        step(backend, module, *batch())
    for role in USED:
        assert module.fp8_state().roles[role].amax_history.count_nonzero() == 2


def test_evaluation_leaves_the_state_as_it_was() -> None:
    backend, module = make("te", PRESETS["fp8-delayed"], "layer_norm_linear")
    step(backend, module, *batch())
    before = module.fp8_state()
    with torch.no_grad(), backend.forward_pass():
        module(batch(50.0)[0])
    assert_same(module.fp8_state(), before)


@pytest.mark.parametrize("kind", ["linear", "layer_norm_linear"])
def test_recording_in_bf16_fills_the_histories_as_the_emulation_does(kind: str) -> None:
    (te_backend, te_module), (backend, module) = pair(PRESETS["fp8-delayed"], kind)
    recorders = [Recorder(PRESETS["fp8-delayed"], torch.device("cuda")) for _ in range(2)]
    te_backend.recorder, backend.recorder = recorders
    for size in (1.0, 4.0):
        values, gradient = batch(size)
        theirs, ours = step(te_backend, te_module, values, gradient), step(backend, module, values, gradient)
        assert all(sqnr(theirs[name], ours[name]) > BF16_SQNR for name in ours)
    (their_states,), (our_states,) = (recorder.states().values() for recorder in recorders)
    for role in USED:
        their_state, our_state = their_states.roles[role], our_states.roles[role]
        torch.testing.assert_close(their_state.amax_history, our_state.amax_history, rtol=2**-20, atol=0)
        torch.testing.assert_close(their_state.scale, our_state.scale, rtol=2**-20, atol=0)
        assert our_state.amax_history.count_nonzero() == 2


def test_state_that_is_set_is_the_state_that_is_used() -> None:
    (te_backend, te_module), (backend, module) = pair(PRESETS["fp8-delayed"], "linear")
    state = state_of(1024)
    for one in (te_module, module):
        one.set_fp8_state(state)
        assert_same(one.fp8_state(), state)
    values, gradient = batch()
    theirs, ours = step(te_backend, te_module, values, gradient), step(backend, module, values, gradient)
    assert all(sqnr(theirs[name], ours[name]) > FP8_SQNR for name in ours)
    assert_same(te_module.fp8_state(), module.fp8_state())


def test_a_history_of_another_length_keeps_its_newest_rows() -> None:
    backend, module = make("te", Precision(fp8=True, delayed=RECIPES["max"]), "linear")
    module.set_fp8_state(state_of(1024))
    expected = state_of(1024).roles["input"].amax_history
    assert module.fp8_state().roles["input"].amax_history.tolist() == [0.0, *expected[-7:].tolist()]


def test_te_s_payload_is_read_as_the_state_it_holds() -> None:
    import transformer_engine.pytorch as te

    backend, module = make("te", Precision(fp8=True, delayed=RECIPES["margin"]), "linear")
    step(backend, module, *batch())
    payload = te.Linear.get_extra_state(module)
    decoded = decode_payload(payload.numpy().tobytes(), "linear")
    assert decoded is not None
    assert decoded[0] == RECIPES["margin"]
    assert_same(decoded[1], module.fp8_state())


def test_te_accepts_our_payload_and_holds_the_state_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformer_engine.pytorch as te

    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    backend, module = make("te", Precision(fp8=True, delayed=RECIPES["max"]), "layer_norm_linear")
    payload = encode_payload(state_of(8), RECIPES["max"])
    te.LayerNormLinear.set_extra_state(module, torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    assert_same(module.fp8_state(), state_of(8))
    step(backend, module, *batch())
    assert module.fp8_state().roles["input"].amax_history[-2] == state_of(8).roles["input"].amax_history[-1]


def test_sizes_that_te_would_refuse_are_refused_with_the_name_of_the_module() -> None:
    backend, module = make("te", PRESETS["fp8-delayed"], "linear")
    with pytest.raises(PrecisionError, match="linear_fc1"), backend.forward_pass():
        module(batch()[0][:, :5])


def test_an_amax_on_a_gpu_passes_over_what_is_not_a_number() -> None:
    values = torch.tensor([1.0, torch.nan, -3.0, 2.0], device="cuda").bfloat16()
    assert numerics.amax(values) == 3
    assert numerics.amax(torch.cat([values, values.new_tensor([-torch.inf])])) == torch.inf
    assert numerics.amax(values[:0]) == 0
