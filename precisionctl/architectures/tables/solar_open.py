"""Solar Open: Llama's attention before DeepSeek-V3's experts, in every layer.

Trap: its class has no `intermediate_size` and no `first_k_dense_replace`. Released files say both, as GLM-4.5's do.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama

ARCHITECTURE = Architecture(
    model_types={"solar_open": "SolarOpenForCausalLM"},
    behind={"gate": "experts"},
    rows=deepseek_rows.decoder((*llama.ATTENTION_NORM, *llama.ATTENTION)),
    config=(
        *keys.SIZES_BESIDE_MLP,
        keys.heads(num_key_value_heads=8, head_dim=128),
        keys.SILU,
        keys.Key("qkv_bias", "attention_bias", False),
        keys.only("use_qk_norm", False),
        *deepseek_keys.experts_of_a_layer(shared=1),
        keys.Key("ffn_hidden_size", "moe_intermediate_size"),  # of no layer
        keys.EVERY_LAYER_SPARSE,
        *deepseek_keys.router(1, 1),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.0),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(1000000.0),
        keys.tied(False),
    ),
)
