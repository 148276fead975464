"""gpt-oss: biases everywhere, a learned sink for each head, a clamped gate, experts in all layers.

Traps: gate and up alternate row by row; experts are stored `[in, out]`, and down_proj is square, so that no shape
tells; in MXFP4, as OpenAI released them, they are `[out, in]`; the router's bias counts for the weights of experts too.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import every_other, sliding_window
from precisionctl.architectures.param_map import Architecture, Either, Row, renamed
from precisionctl.architectures.rearrangements import SAME, Alternating, Rearrangement, Transposed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.architectures.shared.moe_keys import INTERMEDIATE_SIZE_OF_EXPERTS
from precisionctl.param import COLUMNS, GATED_ROWS, ROWS, Parallel

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _matrix(name: str, megatron: str, sizes: tuple[str, ...], stands: Rearrangement, parallel: Parallel) -> Either:
    """An expert's weight, `[in, out]`, or in MXFP4 `[out, in]`."""
    stored = f"model.layers.{{layer}}.mlp.experts.{name}"
    row = Row(f"{stored}[{{expert}}]", megatron, sizes, Transposed(stands), parallel, layers="moe", gemm=True)
    return Either(
        (row,), other=(replace(row, names=f"{stored}_blocks[{{expert}}]", rearrangement=stands),), only_read=True
    )


SINKS = (
    Row(
        "model.layers.{layer}.self_attn.sinks",
        "decoder.layers.{layer}.self_attention.core_attention.softmax_offset",
        ("num_attention_heads",),
        parallel=ROWS,
    ),
)

ARCHITECTURE = Architecture(
    model_types={"gpt_oss": "GptOssForCausalLM"},
    rows=llama.model_rows(
        *llama.ATTENTION_NORM,
        *llama.ATTENTION,
        *SINKS,
        *moe.MOE_NORM,
        *renamed(moe.ROUTER, {"mlp.gate": "mlp.router"}),
        Row(
            "model.layers.{layer}.mlp.router.bias",
            "decoder.layers.{layer}.mlp.router.bias",
            ("moe.num_experts",),
            layers="moe",
        ),
        _matrix("gate_up_proj", moe.FC1, moe.FC1_SIZES, Alternating(), GATED_ROWS),
        Row(
            "model.layers.{layer}.mlp.experts.gate_up_proj_bias[{expert}]",
            "decoder.layers.{layer}.mlp.experts.linear_fc1.bias{expert}",
            ("expert_fc1_size",),
            Alternating(),
            GATED_ROWS,
            layers="moe",
        ),
        _matrix("down_proj", moe.FC2, moe.FC2_SIZES, SAME, COLUMNS),
        Row(
            "model.layers.{layer}.mlp.experts.down_proj_bias[{expert}]",
            "decoder.layers.{layer}.mlp.experts.linear_fc2.bias{expert}",
            ("hidden_size",),
            layers="moe",
        ),
    ),
    config=llama_keys(
        keys.only("swiglu_alpha", 1.702, "activation", "quick_gelu"),
        keys.Key("activation_clamp", "swiglu_limit", 7.0),
        keys.always("glu_offset", 1.0),
        keys.only("attention_bias", True, "qkv_bias", True),
        keys.always("proj_bias", True),
        keys.always("mlp_bias", True),
        keys.always("softmax_offset", True),
        keys.Key("moe.num_experts", "num_local_experts", synonym="num_experts"),
        keys.Key("moe.topk", "num_experts_per_tok"),
        INTERMEDIATE_SIZE_OF_EXPERTS,
        keys.always("moe.router_bias", True),
        heads=keys.heads(num_key_value_heads=8, head_dim=64),
        epsilon=1e-5,
        rotary=rope(150000.0, scaling=_YARN),
        after_rotary=(sliding_window(every_other, absent=128),),
    ),
)
