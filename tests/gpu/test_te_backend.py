"""Transformer Engine against the emulation, on a GPU that has FP8: `python -m pytest tests/gpu`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from precisionctl.errors import PrecisionError
from precisionctl.fp8 import numerics
from precisionctl.fp8.extra_state import decode_payload
from precisionctl.fp8.extra_state_writer import encode_payload
from precisionctl.fp8.state import BACKWARD, FORWARD, DelayedScaling, Fp8State, Role, RoleState
from precisionctl.model_shape import MLA, ModelShape, MoE
from precisionctl.precision import PRESETS, Precision
from precisionctl.trainer.backend import Backend, BackendName, Norm, fp8_linears, make_backend
from precisionctl.trainer.model import GPT, loss
from precisionctl.trainer.recorder import Recorder
from precisionctl.trainer.segments import Segments

TOKENS, IN, OUT = 256, 512, 768
USED: tuple[Role, ...] = ("input", "weight", "grad_output")
RECIPES = {
    "max": DelayedScaling(amax_history_len=8),
    "most recent": DelayedScaling(amax_history_len=8, amax_compute_algo="most_recent"),
    "margin": DelayedScaling(amax_history_len=3, margin=2),
    "E4M3": DelayedScaling(amax_history_len=8, fp8_format="E4M3"),
    "no history": DelayedScaling(amax_history_len=1),
}
FP8_SQNR, BF16_SQNR = 45.0, 45.0
"""Decibels. Rounding to BF16 alone leaves 56 dB and more. Hopper's tensor cores keep about 14 bits of a forward
FP8 sum (backward ones are promoted to FP32), and norms may round a few inputs to the neighbouring code."""


@pytest.fixture(autouse=True)
def exact_fp32_products() -> Iterator[None]:
    """The emulation multiplies code values in FP32; TF32 would round E5M2 sums."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def make(name: BackendName, precision: Precision, kind: str) -> tuple[Backend, Any]:
    backend = make_backend(name, precision, torch.bfloat16, torch.device("cuda"))
    module = "decoder.layers.0.mlp.linear_fc1"
    if kind == "linear":
        return backend, backend.linear(module, IN, OUT, True)
    norm = Norm("LayerNorm", 1e-5, zero_centered=True) if kind == "layer_norm_1p_linear" else Norm("RMSNorm", 1e-5)
    return backend, backend.layer_norm_linear(module, IN, OUT, True, norm)


def pair(precision: Precision, kind: str) -> list[tuple[Backend, Any]]:
    """The same linear on Transformer Engine and emulated."""
    pair = [make("te", precision, kind), make("emulated", precision, kind)]
    weights = {name: torch.randn_like(p) * 0.05 for name, p in pair[1][1].named_parameters()}
    for _, module in pair:
        module.load_state_dict(weights)
    return pair


def step(backend: Backend, module: nn.Module, values: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """One pass; its output and gradients by name."""
    values = values.detach().requires_grad_()
    module.zero_grad()
    passes = backend.recorder or backend
    with passes.forward_pass():
        out = module(values)
    out.backward(gradient)
    passes.after_backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert values.grad is not None
    return {"out": out.detach(), "values": values.grad, **gradients}


def batch(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    values, gradient = (torch.randn(2, TOKENS // 2, size, device="cuda") for size in (IN, OUT))
    return (values * scale).bfloat16(), (gradient * scale / 1000).bfloat16()


def sqnr(signal: Tensor, other: Tensor) -> float:
    signal, other = signal.detach().double(), other.detach().double()
    return float(20 * torch.log10(signal.norm() / (signal - other).norm().clamp(min=1e-30)))


@pytest.mark.parametrize("kind", ["linear", "layer_norm_linear", "layer_norm_1p_linear"])
@pytest.mark.parametrize("preset", ["bf16", "fp8-delayed", "fp8-current"])
def test_outputs_and_gradients_agree_within_the_accumulation_of_the_gemm(kind: str, preset: str) -> None:
    (te_backend, te_module), (backend, module) = pair(PRESETS[preset], kind)
    for _ in range(3):
        values, gradient = batch()
        theirs, ours = step(te_backend, te_module, values, gradient), step(backend, module, values, gradient)
        assert theirs.keys() == ours.keys()
        for name in ours:
            assert theirs[name].dtype == ours[name].dtype
            assert sqnr(theirs[name], ours[name]) > (BF16_SQNR if preset == "bf16" else FP8_SQNR), name


@pytest.mark.parametrize("norm", [Norm(k, 1e-5, z) for k in ("RMSNorm", "LayerNorm") for z in (False, True)], ids=str)
def test_norms_agree(norm: Norm) -> None:
    backends = [make_backend(n, PRESETS["bf16"], torch.bfloat16, torch.device("cuda")) for n in ("te", "emulated")]
    theirs, ours = (backend.norm(IN, norm) for backend in backends)
    theirs.load_state_dict({name: torch.randn_like(p) for name, p in ours.named_parameters()})
    ours.load_state_dict(theirs.state_dict())
    values = batch()[0]
    assert sqnr(theirs(values), ours(values)) > BF16_SQNR


def test_grouped_linears_agree_and_stay_in_bf16_under_an_fp8_recipe() -> None:
    counts, made = [100, 0, 1, 155], []
    values, gradient = (torch.randn(256, size, device="cuda").bfloat16() for size in (IN, OUT))
    for name in ("te", "emulated"):
        backend = make_backend(name, PRESETS["fp8-delayed"], torch.bfloat16, torch.device("cuda"))
        module = backend.grouped_linear(4, IN, OUT, True)
        if made:
            module.load_state_dict(made[0][0].state_dict())
        with backend.forward_pass():
            out = module(values, counts)
        out.backward(gradient)
        made.append((module, out))
    (theirs, their_out), (ours, our_out) = made
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    assert sqnr(their_out, our_out) > BF16_SQNR
    for name, one in theirs.named_parameters():
        assert name in ("weight1", "bias1") or sqnr(one.grad, ours.get_parameter(name).grad) > BF16_SQNR, name


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
            roles[role] = numerics.update_delayed(roles[role], RECIPES[recipe].dtype(role), RECIPES[recipe])
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


SHAPE = ModelShape(
    architecture="llama",
    num_layers=2,
    hidden_size=256,
    ffn_hidden_size=512,
    num_attention_heads=8,
    num_query_groups=2,
    kv_channels=32,
    vocab_size=500,
    padded_vocab_size=512,
    max_position_embeddings=128,
)


WINDOW = {"sliding_window": 32, "window_layers": (True, False)}
SHAPES = {
    "like Gemma": replace(
        SHAPE,
        post_layernorms=True,
        zero_centered_gamma=True,
        activation="gelu_tanh",
        attn_logit_softcapping=5.0,
        **WINDOW,
    ),
    "like gpt-oss": replace(
        SHAPE,
        softmax_offset=True,
        add_bias_linear=True,
        activation="quick_gelu",
        activation_clamp=7.0,
        glu_offset=1.0,
        moe=MoE(4, 2, 128, (True, True), router_bias=True),
        **WINDOW,
    ),
    "like DeepSeek": replace(
        SHAPE,
        num_query_groups=8,
        mla=MLA(64, 64, 32, 16, 32),
        moe=MoE(8, 2, 128, (False, True), shared_ffn_hidden_size=128, score_function="sigmoid", expert_bias=True),
        mtp_num_layers=1,
    ),
    "like Nemotron": replace(
        SHAPE,
        normalization="LayerNorm",
        zero_centered_gamma=True,
        activation="squared_relu",
        gated_linear_unit=False,
        rotary_percent=0.5,
    ),
}


def gpts(precision: Precision, shape: ModelShape = SHAPE) -> tuple[GPT, GPT]:
    theirs, ours = (GPT(shape, precision, name, device="cuda") for name in ("te", "emulated"))
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def train_step(model: GPT, tokens: Tensor) -> Tensor:
    total, count = loss(model(tokens), tokens, torch.ones_like(tokens, dtype=torch.bool), SHAPE.vocab_size)
    (total / count).backward()
    return (total / count).detach()


def test_both_gpts_have_the_same_names_and_no_extra_state() -> None:
    theirs, ours = gpts(PRESETS["fp8-delayed"])
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    assert not any("_extra_state" in name for name in theirs.state_dict())
    assert fp8_linears(theirs).keys() == fp8_linears(ours).keys()


@pytest.mark.parametrize("preset", ["bf16", "fp8-delayed", "fp8-current"])
def test_both_gpts_compute_the_same_loss_and_gradients(preset: str) -> None:
    theirs, ours = gpts(PRESETS[preset])
    for _ in range(2):
        tokens = torch.randint(500, (2, 128), device="cuda")
        torch.testing.assert_close(train_step(theirs, tokens), train_step(ours, tokens), rtol=2e-3, atol=0)
    for name, one in theirs.named_parameters():
        other = ours.get_parameter(name)
        assert one.grad is not None
        assert other.grad is not None
        assert sqnr(one.grad, other.grad) > 15, name  # a code that rounds the other way goes through every later layer


@pytest.mark.parametrize("preset", ["bf16", "fp8-delayed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_both_gpts_of_other_families_compute_the_same_loss(shape: ModelShape, preset: str) -> None:
    """Gradients are not compared: a score that is rounded the other way sends a token to another expert."""
    theirs, ours = gpts(PRESETS[preset], shape)
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    tokens = torch.randint(500, (2, 128), device="cuda")
    torch.testing.assert_close(train_step(theirs, tokens), train_step(ours, tokens), rtol=5e-3, atol=0)


@pytest.mark.parametrize("window", [None, 24])
def test_both_gpts_attend_alike_to_texts_that_share_rows(window: int | None) -> None:
    theirs, ours = gpts(PRESETS["bf16"], replace(SHAPE, sliding_window=window))
    tokens = torch.randint(500, (2, 128), device="cuda")
    segments = Segments((50, 70, 8, 128))
    together, one_by_one = (model(tokens, segments=segments) for model in (theirs, ours))
    assert sqnr(together, one_by_one) > 35
    assert sqnr(theirs(tokens), together) < 25, "texts would see one another"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_both_gpts_show_a_recorder_the_same(shape: ModelShape) -> None:
    """Amaxes of BF16 passes, keys and values too; a token that is sent to another expert may be the largest there."""
    made = []
    real = torch.ones(2, 128, dtype=torch.bool, device="cuda")
    real[1, 96:] = False
    tokens = torch.randint(500, (2, 128), device="cuda")
    for model in gpts(PRESETS["fp8-delayed"], shape):
        recorder = Recorder(PRESETS["fp8-delayed"], torch.device("cuda"))
        with model.recorded_by(recorder):
            total, count = loss(model(tokens, real), tokens, real, SHAPE.vocab_size)
            (total / count).backward()
        made.append(recorder.states())
    theirs, ours = made
    assert theirs.keys() == ours.keys()
    for name in ours:
        assert theirs[name].roles.keys() == ours[name].roles.keys()
        for role, part in ours[name].roles.items():
            other = theirs[name].roles[role].amax_history
            if part.recorded and part.scale.dim() == 0:
                torch.testing.assert_close(other, part.amax_history, rtol=0.1, atol=0, msg=f"{name} {role}")


def test_every_linear_of_a_gpt_records_one_row_per_step_and_role() -> None:
    kept = Precision(fp8=True, delayed=RECIPES["max"], keep_bf16=("*.layers.0.mlp.linear_fc2",))
    for model in gpts(kept):
        for _ in range(3):
            train_step(model, torch.randint(500, (2, 128), device="cuda"))
        linears = fp8_linears(model)
        assert len(linears) == 7
        for linear in linears.values():
            state = linear.fp8_state()
            assert state is not None
            assert [state.roles[role].amax_history.count_nonzero().item() for role in USED] == [3, 3, 3]


def state_of(history: int) -> Fp8State:
    """Scales and rows all different, so that a mix-up of roles or rows shows."""
    return Fp8State(
        {
            role: RoleState(torch.tensor(1.5 + i), torch.arange(history) * (1 + i / 8))
            for i, role in enumerate(FORWARD + BACKWARD)
        }
    )


def assert_same(one: Fp8State | None, other: Fp8State | None) -> None:
    assert one is not None
    assert other is not None
    for role in FORWARD + BACKWARD:
        assert torch.equal(one.roles[role].scale, other.roles[role].scale), role
        assert torch.equal(one.roles[role].amax_history, other.roles[role].amax_history), role
