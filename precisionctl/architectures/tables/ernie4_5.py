"""ERNIE 4.5 (dense): Llama whose rotary channels are neighbouring pairs.

Trap: one switch for all biases.
"""

from precisionctl.architectures.config_keys import SILU, SIZES, Always, Key, biases, heads, tied
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = Architecture(
    model_types={"ernie4_5": "Ernie4_5ForCausalLM"},
    rows=LLAMA.rows,
    config=(
        *SIZES,
        heads(num_key_value_heads=2, head_dim=128),
        SILU,
        biases("use_bias", False),
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
        Always("rotary_interleaved", True),
        rope(500000.0),
        tied(True),
    ),
)
