"""Mistral and Ministral: Llama's tensors, a sliding window and no biases.

Trap: Hugging Face's window counts the token itself, Megatron's the tokens to its left.
"""

from precisionctl.architectures.config_keys import SILU, SIZES, Entry, Key, heads, tied
from precisionctl.architectures.config_layers import everywhere, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA

COMMON: tuple[Entry, ...] = (
    *SIZES,
    heads(num_key_value_heads=8),
    SILU,
    sliding_window(everywhere, absent=4096),
    tied(False),
)

ARCHITECTURE = Architecture(
    model_types={"mistral": "MistralForCausalLM", "ministral": "MinistralForCausalLM"},
    rows=LLAMA.rows,
    config=(*COMMON, Key("norm_epsilon", "rms_norm_eps", 1e-6), rope()),
)
