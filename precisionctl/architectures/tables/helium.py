"""Helium (Kyutai): Llama whose rotary channels are neighbouring pairs.

Trap: `attention_bias` is of q, k and v alone, and attention gives as many channels as the model has.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = Architecture(
    model_types={"helium": "HeliumForCausalLM"},
    rows=LLAMA.rows,
    config=llama_keys(
        keys.Key("qkv_bias", "attention_bias", False),
        keys.Key("mlp_bias", "mlp_bias", False),
        keys.always("rotary_interleaved", True),
        heads=keys.heads(num_key_value_heads=20, head_dim=128),
        epsilon=1e-8,
        rotary=rope(100000.0),
    ),
)
