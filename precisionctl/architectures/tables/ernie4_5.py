"""ERNIE 4.5 (dense): Llama whose rotary channels are neighbouring pairs.

Trap: one switch for all biases.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = Architecture(
    model_types={"ernie4_5": "Ernie4_5ForCausalLM"},
    rows=LLAMA.rows,
    config=llama_keys(
        keys.biases("use_bias", False),
        keys.always("rotary_interleaved", True),
        heads=keys.heads(num_key_value_heads=2, head_dim=128),
        epsilon=1e-5,
        rotary=rope(500000.0),
        tied=True,
    ),
)
