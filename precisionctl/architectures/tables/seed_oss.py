"""Seed-OSS: Llama with biases of q, k and v, and a switch of its own for o_proj's.

Trap: the biases of q, k and v are there unless config.json says otherwise.
"""

from precisionctl.architectures.config_keys import SILU, SIZES, Key, heads, tied
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = Architecture(
    model_types={"seed_oss": "SeedOssForCausalLM"},
    rows=LLAMA.rows,
    config=(
        *SIZES,
        heads(num_key_value_heads=8, head_dim=128),
        SILU,
        Key("qkv_bias", "attention_bias", True),
        Key("proj_bias", "attention_out_bias", False),
        Key("mlp_bias", "mlp_bias", False),
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        tied(False),
    ),
)
