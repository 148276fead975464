"""Qwen2 and Qwen2.5: Llama with biases of q, k and v.

Trap: no key of config.json says that those biases are there, and o_proj has none.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import from_max_window_layers, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA

WINDOW = sliding_window(
    from_max_window_layers(28), switch="use_sliding_window", absent=4096, also=("max_window_layers",)
)

ARCHITECTURE = Architecture(
    model_types={"qwen2": "Qwen2ForCausalLM"},
    rows=LLAMA.rows,
    config=llama_keys(keys.always("qkv_bias", True), heads=keys.heads(num_key_value_heads=32), after_rotary=(WINDOW,)),
)
