"""Qwen2-MoE: Qwen2 with experts, and shared ones that each token lets through by a gate of its own.

Trap: without `norm_topk_prob`, as released, the chosen experts' weights are their scores among all.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.architectures.shared.moe_keys import EXPERT_KEYS


def _every_other_of_the_first(config: keys.Config, layers: int) -> list[bool]:
    first = keys.size(config, "max_window_layers", absent=28)
    return [layer % 2 == 0 and layer < first for layer in range(layers)]


ARCHITECTURE = Architecture(
    model_types={"qwen2_moe": "Qwen2MoeForCausalLM"},
    rows=llama.model_rows(
        *llama.ATTENTION_NORM,
        *llama.ATTENTION,
        *llama.MLP_NORM,
        *llama.MLP,
        *moe.MOE_NORM,
        *moe.ROUTER,
        *moe.GATED_SHARED_EXPERT,
        *moe.EXPERTS,
    ),
    config=llama_keys(
        keys.Key("qkv_bias", "qkv_bias", True),
        *EXPERT_KEYS,
        keys.Key("moe.shared_ffn_hidden_size", "shared_expert_intermediate_size", 5632),
        keys.always("moe.shared_expert_gate", True),
        heads=keys.heads(num_key_value_heads=16),
        after_rotary=(
            sliding_window(
                _every_other_of_the_first, switch="use_sliding_window", absent=4096, also=("max_window_layers",)
            ),
        ),
    ),
)
