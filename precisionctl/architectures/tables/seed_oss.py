"""Seed-OSS: Llama with biases of q, k and v, and a switch of its own for o_proj's.

Trap: the biases of q, k and v are there unless config.json says otherwise.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = Architecture(
    model_types={"seed_oss": "SeedOssForCausalLM"},
    rows=LLAMA.rows,
    config=llama_keys(
        keys.Key("qkv_bias", "attention_bias", True),
        keys.Key("proj_bias", "attention_out_bias", False),
        keys.Key("mlp_bias", "mlp_bias", False),
        heads=keys.heads(num_key_value_heads=8, head_dim=128),
    ),
)
