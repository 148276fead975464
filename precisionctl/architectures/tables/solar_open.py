"""Solar Open: Llama's attention before DeepSeek-V3's experts, in every layer.

Trap: its class has no `intermediate_size` and no `first_k_dense_replace`. Released files say both, as GLM-4.5's do.
"""

from precisionctl.architectures.config_keys import EVERY_LAYER_SPARSE, SILU, SIZES_BESIDE_MLP, Key, Only, heads, tied
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.deepseek_keys import SIGMOID, experts_of_a_layer, groups
from precisionctl.architectures.shared.deepseek_rows import decoder
from precisionctl.architectures.shared.llama_rows import ATTENTION, ATTENTION_NORM

ARCHITECTURE = Architecture(
    model_types={"solar_open": "SolarOpenForCausalLM"},
    behind={"gate": "experts"},
    rows=decoder((*ATTENTION_NORM, *ATTENTION)),
    config=(
        *SIZES_BESIDE_MLP,
        heads(num_key_value_heads=8, head_dim=128),
        SILU,
        Key("qkv_bias", "attention_bias", False),
        Only("use_qk_norm", False),
        *experts_of_a_layer(shared=1),
        Key("ffn_hidden_size", "moe_intermediate_size"),  # of no layer
        EVERY_LAYER_SPARSE,
        *SIGMOID,
        Only("norm_topk_prob", True),
        groups(1, 1),
        Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.0),
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(1000000.0),
        tied(False),
    ),
)
