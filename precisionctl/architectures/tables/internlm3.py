"""InternLM3: Llama, with the older names `qkv_bias` and `bias` for the switches of biases."""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = Architecture(
    model_types={"internlm3": "InternLM3ForCausalLM"},
    rows=LLAMA.rows,
    config=(
        *keys.SIZES,
        keys.heads(num_key_value_heads=2, head_dim=128),
        keys.SILU,
        keys.Key("qkv_bias", "attention_bias", False, synonym="qkv_bias"),
        keys.Key("proj_bias", "mlp_bias", False, synonym="bias"),
        keys.Key("mlp_bias", "mlp_bias", False, synonym="bias"),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(),
        keys.tied(False),
    ),
)
