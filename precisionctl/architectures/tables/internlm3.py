"""InternLM3: Llama, with the older names `qkv_bias` and `bias` for the switches of biases."""

from precisionctl.architectures.config_keys import SILU, SIZES, Key, heads, tied
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = Architecture(
    model_types={"internlm3": "InternLM3ForCausalLM"},
    rows=LLAMA.rows,
    config=(
        *SIZES,
        heads(num_key_value_heads=2, head_dim=128),
        SILU,
        Key("qkv_bias", "attention_bias", False, synonym="qkv_bias"),
        Key("proj_bias", "mlp_bias", False, synonym="bias"),
        Key("mlp_bias", "mlp_bias", False, synonym="bias"),
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(),
        tied(False),
    ),
)
