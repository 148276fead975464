"""Qwen3.5's text model with experts in all layers.

Trap: there is no `intermediate_size`, as no layer is dense.
"""

from precisionctl.architectures.config_keys import EVERY_LAYER_SPARSE, SIZES_BESIDE_MLP, Always, Key, heads
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared.delta_net_keys import COMMON
from precisionctl.architectures.shared.delta_net_rows import SPARSE
from precisionctl.architectures.tables.qwen3_5 import PREDICTION_LAYERS, rows

ARCHITECTURE = Architecture(
    model_types={"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    rows=rows(*SPARSE),
    config=(
        *SIZES_BESIDE_MLP,
        *COMMON,
        heads(num_key_value_heads=2, head_dim=256),
        Key("ffn_hidden_size", "moe_intermediate_size", 512),
        Key("moe.ffn_hidden_size", "moe_intermediate_size", 512),
        EVERY_LAYER_SPARSE,
        Key("moe.num_experts", "num_experts", 256),
        Key("moe.topk", "num_experts_per_tok", 8),
        Key("moe.shared_ffn_hidden_size", "shared_expert_intermediate_size", 512),
        Always("moe.shared_expert_gate", True),
        PREDICTION_LAYERS,
    ),
)
