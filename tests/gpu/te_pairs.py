"""The same module, or the same GPT, on Transformer Engine and emulated; and what tests of both share."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from precisionctl.errors import EnvironmentProblem
from precisionctl.fp8.state import BACKWARD, FORWARD, DelayedScaling, Fp8State, Role, RoleState
from precisionctl.model.model_parts import MLA, GlobalAttention, HyperConnections, MoE
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import GatedDeltaNet, Mamba, ShortConv
from precisionctl.model.sparse_parts import CSA, DSA, MSA
from precisionctl.precision import PRESETS, Precision
from precisionctl.trainer.backends.base import Backend, Norm
from precisionctl.trainer.backends.choose import BackendName, choose_backend, make_backend
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.model.loss import loss

TOKENS, IN, OUT = 256, 512, 768
USED: tuple[Role, ...] = ("input", "weight", "grad_output")
RECIPES = {
    "max": DelayedScaling(amax_history_len=8),
    "most recent": DelayedScaling(amax_history_len=8, amax_compute_algo="most_recent"),
    "margin": DelayedScaling(amax_history_len=3, margin=2),
    "E4M3": DelayedScaling(amax_history_len=8, fp8_format="E4M3"),
    "no history": DelayedScaling(amax_history_len=1),
}


def refused(precision: Precision) -> list[pytest.MarkDecorator]:
    """Marks of a test that this GPU cannot run: MXFP8 and NVFP4 want Blackwell."""
    try:
        choose_backend("te", precision)
    except EnvironmentProblem as problem:
        return [pytest.mark.skip(reason=problem.what)]
    return []


EVERY_PRESET = [pytest.param(name, marks=refused(precision)) for name, precision in PRESETS.items()]
FP8_SQNR, BF16_SQNR = 45.0, 45.0
"""Decibels. Rounding to BF16 alone leaves 56 dB and more. Hopper's tensor cores keep about 14 bits of a forward
FP8 sum (backward ones are promoted to FP32), and norms may round a few inputs to the neighbouring code."""


RANDOM_SQNR = 8.0
"""Decibels, of gradients in NVFP4: both round theirs at random, each to 11 dB or more of its sums."""


def least_sqnr(preset: str, of_product: str) -> float:
    """How near to each other Transformer Engine's result and the emulated one have to be, in decibels."""
    if preset == "nvfp4" and of_product.startswith(("values", "weight")):
        return RANDOM_SQNR
    return BF16_SQNR if preset == "bf16" else FP8_SQNR


def make(name: BackendName, precision: Precision, kind: str) -> tuple[Backend, Any]:
    backend = make_backend(name, precision, torch.bfloat16, torch.device("cuda"))
    module = "decoder.layers.0.mlp.linear_fc1"
    if kind == "linear":
        return backend, backend.linear(module, IN, OUT, True)
    norm = Norm("LayerNorm", 1e-5, zero_centered=True) if kind == "layer_norm_1p_linear" else Norm("RMSNorm", 1e-5)
    return backend, backend.layer_norm_linear(module, IN, OUT, True, norm, None)


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
GEMMA_4 = replace(
    SHAPE,
    post_layernorms=True,
    activation="gelu_tanh",
    qk_layernorm=True,
    v_l2_norm=True,
    layer_scalar=True,
    query_pre_attn_scalar=16.0,  # with its own 1 and random weights, roundings of BF16 become a tenth of a gradient
    global_attention=GlobalAttention(num_query_groups=1, kv_channels=64, keys_are_values=True),
    **WINDOW,
)
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
    "like Gemma 4": GEMMA_4,
    "like Gemma 4 E2B": replace(
        GEMMA_4,
        num_layers=4,
        tied_embeddings=True,
        global_attention=GlobalAttention(num_query_groups=2, kv_channels=64, keys_are_values=False),
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        per_layer_embed_dim=32,
        window_layers=(True, False) * 2,
    ),
    "like Qwen3.5": replace(
        SHAPE,
        zero_centered_gamma=True,
        qk_layernorm=True,
        attention_output_gate=True,
        rotary_percent=0.25,
        gdn=GatedDeltaNet((True, False), 4, 8, 32, 32, 4),
        moe=MoE(4, 2, 128, (True, True), shared_ffn_hidden_size=128, shared_expert_gate=True),
    ),
    "like Kimi Linear": replace(
        SHAPE,
        num_query_groups=8,
        rope_layers=(False, False),
        mla=MLA(None, 64, 32, 16, 32),
        gdn=GatedDeltaNet((True, False), 16, 16, 32, 32, 4, kda=True, kda_lora_rank=32),
        moe=MoE(8, 2, 128, (False, True), shared_ffn_hidden_size=128, score_function="sigmoid", expert_bias=True),
    ),
    "like Ling 3": replace(
        SHAPE,
        num_query_groups=8,
        mla=MLA(None, 64, 32, 16, 32),
        linear_gate="sigmoid per head",
        gdn=GatedDeltaNet((True, False), 16, 16, 32, 32, 4, kda=True, kda_lower_bound=-5.0),
    ),
    "like Nemotron-H": replace(
        SHAPE,
        activation="squared_relu",
        gated_linear_unit=False,
        rope_layers=(False, False),
        mamba=Mamba("M*", 32, 8, 2, 32),
    ),
    "like Granite 4": replace(
        SHAPE,
        num_layers=4,
        embedding_multiplier=12.0,
        residual_multiplier=0.25,
        logits_scaling=0.5,
        query_pre_attn_scalar=64.0,
        rope_layers=(False,) * 4,
        mamba=Mamba("ME*E", 32, 8, 2, 32),
        moe=MoE(4, 2, 128, (False, True) * 2, shared_ffn_hidden_size=128),
    ),
    "like Llama 4": replace(
        SHAPE,
        rotary_interleaved=True,
        qk_l2_norm=True,
        attention_chunk_size=32,
        window_layers=(True, False),
        rope_layers=(True, False),
        query_scaling_beta=0.1,
        query_scaling_floor=64,
        moe=MoE(4, 1, 128, (True, True), shared_ffn_hidden_size=128, score_function="sigmoid", probs_on_input=True),
    ),
    "like MiMo": replace(
        SHAPE,
        kv_channels=48,
        v_head_dim=32,
        attention_value_scale=0.7,
        num_query_groups=4,
        softmax_offset=True,
        global_attention=GlobalAttention(num_query_groups=2, softmax_offset=False),
        **WINDOW,
    ),
    "like Laguna": replace(SHAPE, linear_gate="softplus per head", qk_layernorm=True, **WINDOW),
    "like LFM3": replace(
        SHAPE,
        qk_layernorm=True,
        post_layernorms=True,
        linear_gate="sigmoid per head",
        short_conv=ShortConv((True, False), 4),
        sliding_window=16,
    ),
    "like A.X K2": replace(
        SHAPE,
        num_query_groups=8,
        norm_gate_rank=16,
        mla=MLA(64, 64, 32, 16, 32, query_gate=True),
        dsa=DSA(2, 32, 256, (True, True)),
    ),
    "like DeepSeek-V4": replace(
        SHAPE,
        num_query_groups=1,
        rotary_base_local=1e4,
        rotary_percent=0.5,
        activation_clamp=10.0,
        csa=CSA("CH", 32, 64, 4, 16, 2, 32, 8),
        mhc=HyperConnections(4, 3),
        moe=MoE(
            *(4, 2, 128, (True, True)),
            shared_ffn_hidden_size=128,
            score_function="sqrtsoftplus",
            expert_bias=True,
            n_hash_layers=1,
        ),
    ),
    "like MiniMax-M3": replace(
        SHAPE,
        zero_centered_gamma=True,
        qk_layernorm=True,
        activation="quick_gelu",
        activation_clamp=7.0,
        glu_offset=1.0,
        rotary_percent=0.5,
        msa=MSA(2, 32, 8, 4, 1, (True, False)),
        moe=MoE(4, 2, 128, (False, True), shared_ffn_hidden_size=128, score_function="sigmoid", expert_bias=True),
    ),
    "like BLOOM": replace(
        SHAPE,
        num_query_groups=8,
        normalization="LayerNorm",
        activation="gelu_tanh",
        gated_linear_unit=False,
        position_embedding="alibi",
        embedding_layernorm=True,
        **dict.fromkeys(("add_bias_linear", "qkv_bias", "proj_bias", "mlp_bias"), True),
    ),
    "like Cohere": replace(
        SHAPE,
        normalization="LayerNorm",
        parallel_residual=True,
        shared_layernorm=True,
        rotary_interleaved=True,
        logit_multiplier=0.0625,
        tied_embeddings=True,
    ),
}


def gpts(precision: Precision, shape: ModelShape = SHAPE) -> tuple[GPT, GPT]:
    theirs, ours = (GPT(shape, precision, name, device="cuda") for name in ("te", "emulated"))
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def train_step(model: GPT, tokens: Tensor) -> Tensor:
    total = loss(model(tokens), tokens, torch.ones_like(tokens, dtype=torch.bool), SHAPE.vocab_size)
    mean = total / tokens.numel()
    mean.backward()
    return mean.detach()


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
