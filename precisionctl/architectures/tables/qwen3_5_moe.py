"""Qwen3.5's text model with experts in all layers.

Trap: there is no `intermediate_size`, as no layer is dense.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared.delta_net_keys import COMMON
from precisionctl.architectures.shared.delta_net_rows import SPARSE
from precisionctl.architectures.tables.qwen3_5 import PREDICTION_LAYERS, rows

ARCHITECTURE = Architecture(
    model_types={"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    rows=rows(*SPARSE),
    config=(
        *keys.SIZES_BESIDE_MLP,
        *COMMON,
        keys.heads(num_key_value_heads=2, head_dim=256),
        keys.Key("ffn_hidden_size", "moe_intermediate_size", 512),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size", 512),
        keys.EVERY_LAYER_SPARSE,
        keys.Key("moe.num_experts", "num_experts", 256),
        keys.Key("moe.topk", "num_experts_per_tok", 8),
        keys.Key("moe.shared_ffn_hidden_size", "shared_expert_intermediate_size", 512),
        keys.always("moe.shared_expert_gate", True),
        PREDICTION_LAYERS,
    ),
)
