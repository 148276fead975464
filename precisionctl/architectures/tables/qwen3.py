"""Qwen3: Llama with a norm of each head's query and key.

Trap: those norms have the size of a head, and a head is wider than hidden_size / heads.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA
from precisionctl.architectures.tables.qwen2 import WINDOW

COMMON: tuple[keys.Entry, ...] = (
    *keys.SIZES,
    keys.ATTENTION_BIAS,
    keys.SILU,
    keys.always("qk_layernorm", True),
    keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
    rope(),
    keys.tied(False),
)

ARCHITECTURE = Architecture(
    model_types={"qwen3": "Qwen3ForCausalLM"},
    rows=LLAMA.rows,
    config=(*COMMON, keys.heads(num_key_value_heads=32, head_dim=128), WINDOW),
)
