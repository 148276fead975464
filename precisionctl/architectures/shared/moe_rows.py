"""Groups of rows of layers with experts, under Llama's names as Qwen3-MoE and DeepSeek have them.

Experts come under a number each, as transformers saves them, or fused in one tensor of three dimensions, as
transformers 5 has them in memory.
"""

from dataclasses import replace

from precisionctl.architectures.param_map import Either, Row, renamed, when
from precisionctl.architectures.rearrangements import GAMMA, GATE_UP, SAME
from precisionctl.param import COLUMNS, GATED_ROWS

MOE_NORM = (
    Row(
        "model.layers.{layer}.post_attention_layernorm.weight",
        "decoder.layers.{layer}.pre_mlp_layernorm.weight",
        ("hidden_size",),
        GAMMA,
        layers="moe",
    ),
)

POST_MOE_NORM = (
    Row(
        "model.layers.{layer}.post_feedforward_layernorm.weight",
        "decoder.layers.{layer}.mlp.post_layernorm.weight",
        ("hidden_size",),
        GAMMA,
        layers="moe",
    ),
)
"""Of what routed and shared experts give together."""

ROUTER = (
    Row(
        "model.layers.{layer}.mlp.gate.weight",
        "decoder.layers.{layer}.mlp.router.weight",
        ("moe.num_experts", "hidden_size"),
        layers="moe",
    ),
)

WIDE_ROUTER = (replace(ROUTER[0], keeps_dtype=True),)
"""Of a family whose class keeps it in FP32 (`_keep_in_fp32_modules_strict`), or that is released so."""

EXPERT_BIAS = (
    Row(
        "model.layers.{layer}.mlp.gate.e_score_correction_bias",
        "decoder.layers.{layer}.mlp.router.expert_bias",
        ("moe.num_experts",),
        present=when("moe.expert_bias"),
        layers="moe",
        keeps_dtype=True,  # FP32: rounded, it would choose other experts
    ),
)
"""For the choice of experts alone."""

SHARED_EXPERTS = (
    Row(
        (
            "model.layers.{layer}.mlp.shared_experts.gate_proj.weight",
            "model.layers.{layer}.mlp.shared_experts.up_proj.weight",
        ),
        "decoder.layers.{layer}.mlp.shared_experts.linear_fc1.weight",
        ("shared_fc1_size", "hidden_size"),
        GATE_UP,
        GATED_ROWS,
        present=when("shared_experts"),
        layers="moe",
        gemm=True,
    ),
    Row(
        "model.layers.{layer}.mlp.shared_experts.down_proj.weight",
        "decoder.layers.{layer}.mlp.shared_experts.linear_fc2.weight",
        ("hidden_size", "moe.shared_ffn_hidden_size"),
        parallel=COLUMNS,
        present=when("shared_experts"),
        layers="moe",
        gemm=True,
    ),
)

JOINED_SHARED_EXPERT = (
    replace(SHARED_EXPERTS[0], names="model.layers.{layer}.shared_mlp.input_linear.weight", rearrangement=SAME),
    *renamed(SHARED_EXPERTS[1:], {"mlp.shared_experts.down_proj": "shared_mlp.output_linear"}),
)
"""Whose gate and up come in one tensor (Granite), the gate first, as in Megatron."""

SHARED_EXPERT = renamed(SHARED_EXPERTS, {"shared_experts": "shared_expert"})

GATED_SHARED_EXPERT = (
    *SHARED_EXPERT,
    Row(
        "model.layers.{layer}.mlp.shared_expert_gate.weight",
        "decoder.layers.{layer}.mlp.shared_experts.gate_weight",
        (1, "hidden_size"),
        present=when("moe.shared_expert_gate"),
        layers="moe",
    ),
)
"""One, that each token lets through by a gate of its own (Qwen)."""

FC1 = "decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}"
FC2 = "decoder.layers.{layer}.mlp.experts.linear_fc2.weight{expert}"
FC1_SIZES = ("expert_fc1_size", "expert_hidden_size")
FC2_SIZES = ("expert_hidden_size", "moe.ffn_hidden_size")


def experts(within: str, gate: str = "w1", up: str = "w3", down: str = "w2") -> tuple[Row, ...]:
    """Rows of experts under a number each `within` a module, by the names of their three linears: Mixtral's, if not
    others."""
    names = [f"{within}.{{expert}}.{linear}.weight" for linear in (gate, up, down)]
    return (
        Row(tuple(names[:2]), FC1, FC1_SIZES, GATE_UP, GATED_ROWS, layers="moe", gemm=True),
        Row(names[2], FC2, FC2_SIZES, parallel=COLUMNS, layers="moe", gemm=True),
    )


FUSED = (
    Row(
        "model.layers.{layer}.mlp.experts.gate_up_proj[{expert}]",
        FC1,
        FC1_SIZES,
        SAME,
        GATED_ROWS,
        layers="moe",
        gemm=True,
    ),
    Row(
        "model.layers.{layer}.mlp.experts.down_proj[{expert}]",
        FC2,
        FC2_SIZES,
        parallel=COLUMNS,
        layers="moe",
        gemm=True,
    ),
)

NUMBERED = experts("model.layers.{layer}.mlp.experts", "gate_proj", "up_proj", "down_proj")
"""One by one."""

EXPERTS = (Either(NUMBERED, in_memory=FUSED),)
FUSED_EXPERTS = (Either(FUSED, for_engines=NUMBERED),)
"""Where the model's class saves them as it has them in memory, and engines look for codes one by one."""
