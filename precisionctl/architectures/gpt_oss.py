"""gpt-oss, with BF16 weights: biases everywhere, a learned sink for each head, a clamped gate, experts in all layers.

Traps: gate and up alternate row by row; experts are stored `[in, out]`, and down_proj is square, so that no shape
tells; the router's bias counts for the weights of experts too. MXFP4 files (`*_blocks`, `*_scales`) are not read.
"""

from precisionctl.architectures.config_keys import (
    HEADS,
    SILU,
    SIZES,
    Always,
    Key,
    Only,
    every_other,
    sliding_window,
    tied,
)
from precisionctl.architectures.llama_rows import (
    ATTENTION,
    ATTENTION_NORM,
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    ROTARY,
    TIED,
)
from precisionctl.architectures.mixtral import EXPERTS_EVERYWHERE
from precisionctl.architectures.moe_rows import FC1, FC1_SIZES, FC2, FC2_SIZES, MOE_NORM
from precisionctl.architectures.moves import SAME, Alternating, Transposed
from precisionctl.architectures.param_map import Architecture, Row
from precisionctl.architectures.rope import rope
from precisionctl.param import COLUMNS, GATED_ROWS, ROWS

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

ARCHITECTURE = Architecture(
    model_types={"gpt_oss": "GptOssForCausalLM"},
    rows=(
        *EMBEDDING,
        *ATTENTION_NORM,
        *ATTENTION,
        Row(
            "model.layers.{layer}.self_attn.sinks",
            "decoder.layers.{layer}.self_attention.core_attention.softmax_offset",
            ("num_attention_heads",),
            parallel=ROWS,
        ),
        *MOE_NORM,
        Row(
            "model.layers.{layer}.mlp.router.weight",
            "decoder.layers.{layer}.mlp.router.weight",
            ("moe.num_experts", "hidden_size"),
            layers="moe",
        ),
        Row(
            "model.layers.{layer}.mlp.router.bias",
            "decoder.layers.{layer}.mlp.router.bias",
            ("moe.num_experts",),
            layers="moe",
        ),
        Row(
            "model.layers.{layer}.mlp.experts.gate_up_proj[{expert}]",
            FC1,
            FC1_SIZES,
            Transposed(Alternating()),
            GATED_ROWS,
            layers="moe",
            gemm=True,
        ),
        Row(
            "model.layers.{layer}.mlp.experts.gate_up_proj_bias[{expert}]",
            "decoder.layers.{layer}.mlp.experts.linear_fc1.bias{expert}",
            ("expert_fc1_size",),
            Alternating(),
            GATED_ROWS,
            layers="moe",
        ),
        Row(
            "model.layers.{layer}.mlp.experts.down_proj[{expert}]",
            FC2,
            FC2_SIZES,
            Transposed(SAME),
            COLUMNS,
            layers="moe",
            gemm=True,
        ),
        Row(
            "model.layers.{layer}.mlp.experts.down_proj_bias[{expert}]",
            "decoder.layers.{layer}.mlp.experts.linear_fc2.bias{expert}",
            ("hidden_size",),
            layers="moe",
        ),
        *FINAL_NORM,
        *OUTPUT,
    ),
    config=(
        *SIZES,
        HEADS,
        SILU,
        Only("swiglu_alpha", 1.702, "activation", "quick_gelu"),
        Key("activation_clamp", "swiglu_limit", 7.0),
        Always("glu_offset", 1.0),
        Only("attention_bias", True, "qkv_bias", True),
        Always("proj_bias", True),
        Always("mlp_bias", True),
        Always("softmax_offset", True),
        Key("moe.num_experts", "num_local_experts"),
        Key("moe.topk", "num_experts_per_tok"),
        EXPERTS_EVERYWHERE,
        Always("moe.router_bias", True),
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(150000.0, scaling=_YARN),
        sliding_window(every_other, absent=128),
        tied(False),
    ),
    aliases=(TIED,),
    derived=ROTARY,
)
