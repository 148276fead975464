"""Qwen3-MoE: Qwen3 with experts in the layers that config.json says.

Trap: before experts, the norm is Megatron's `pre_mlp_layernorm`; in a dense layer it is linear_fc1's own.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import everywhere, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.moe_keys import EXPERT_KEYS
from precisionctl.architectures.tables.qwen3 import COMMON

ARCHITECTURE = Architecture(
    model_types={"qwen3_moe": "Qwen3MoeForCausalLM"},
    behind={"gate": "experts"},
    rows=llama.model_rows(
        *llama.ATTENTION_NORM, *llama.ATTENTION, *llama.MLP_NORM, *llama.MLP, *moe.MOE_NORM, *moe.ROUTER, *moe.EXPERTS
    ),
    config=(
        *COMMON,
        keys.heads(num_key_value_heads=4),
        *EXPERT_KEYS,
        sliding_window(everywhere, switch="use_sliding_window", absent=4096, listed=False),
    ),
)
