"""Qwen2-MoE: Qwen2 with experts, and shared ones that each token lets through by a gate of its own.

Trap: without `norm_topk_prob`, as released, the chosen experts' weights are their scores among all.
"""

from precisionctl.architectures.config_keys import SILU, SIZES, Always, Config, Key, heads, size, tied
from precisionctl.architectures.config_layers import sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION,
    ATTENTION_NORM,
    MLP,
    MLP_NORM,
    model_rows,
)
from precisionctl.architectures.shared.moe_rows import EXPERTS, GATED_SHARED_EXPERT, MOE_NORM, ROUTER
from precisionctl.architectures.tables.qwen3_moe import EXPERT_KEYS


def _every_other_of_the_first(config: Config, layers: int) -> list[bool]:
    first = size({"max_window_layers": 28} | dict(config), "max_window_layers")
    return [layer % 2 == 0 and layer < first for layer in range(layers)]


ARCHITECTURE = Architecture(
    model_types={"qwen2_moe": "Qwen2MoeForCausalLM"},
    rows=model_rows(*ATTENTION_NORM, *ATTENTION, *MLP_NORM, *MLP, *MOE_NORM, *ROUTER, *GATED_SHARED_EXPERT, *EXPERTS),
    config=(
        *SIZES,
        heads(num_key_value_heads=16),
        SILU,
        Key("qkv_bias", "qkv_bias", True),
        *EXPERT_KEYS,
        Key("moe.shared_ffn_hidden_size", "shared_expert_intermediate_size", 5632),
        Always("moe.shared_expert_gate", True),
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        sliding_window(
            _every_other_of_the_first, switch="use_sliding_window", absent=4096, also=("max_window_layers",)
        ),
        tied(False),
    ),
)
