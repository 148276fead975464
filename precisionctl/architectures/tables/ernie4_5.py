"""ERNIE 4.5 (dense): Llama whose rotary channels are neighbouring pairs.

Trap: one switch for all biases.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = Architecture(
    model_types={"ernie4_5": "Ernie4_5ForCausalLM"},
    rows=LLAMA.rows,
    config=(
        *keys.SIZES,
        keys.heads(num_key_value_heads=2, head_dim=128),
        keys.SILU,
        keys.biases("use_bias", False),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
        keys.Always("rotary_interleaved", True),
        rope(500000.0),
        keys.tied(True),
    ),
)
