"""Seed-OSS: Llama with biases of q, k and v, and a switch of its own for o_proj's.

Trap: the biases of q, k and v are there unless config.json says otherwise.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = Architecture(
    model_types={"seed_oss": "SeedOssForCausalLM"},
    rows=LLAMA.rows,
    config=(
        *keys.SIZES,
        keys.heads(num_key_value_heads=8, head_dim=128),
        keys.SILU,
        keys.Key("qkv_bias", "attention_bias", True),
        keys.Key("proj_bias", "attention_out_bias", False),
        keys.Key("mlp_bias", "mlp_bias", False),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        keys.tied(False),
    ),
)
