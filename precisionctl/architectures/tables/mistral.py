"""Mistral and Ministral: Llama's tensors, a sliding window and no biases.

Trap: Hugging Face's window counts the token itself, Megatron's the tokens to its left.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import everywhere, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA

COMMON: tuple[keys.Entry, ...] = (
    *keys.SIZES,
    keys.heads(num_key_value_heads=8),
    keys.SILU,
    sliding_window(everywhere, absent=4096),
    keys.tied(False),
)

ARCHITECTURE = Architecture(
    model_types={"mistral": "MistralForCausalLM", "ministral": "MinistralForCausalLM"},
    rows=LLAMA.rows,
    config=(*COMMON, keys.Key("norm_epsilon", "rms_norm_eps", 1e-6), rope()),
)
