"""Gemma: Llama whose norms store their factor less one, with a scaled embedding and a GELU gate.

Trap: `gelu` in config.json means the tanh approximation.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.tables.gemma2 import OF_ALL_GEMMAS
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = Architecture(
    model_types={"gemma": "GemmaForCausalLM"},
    rows=LLAMA.rows,
    config=(
        *OF_ALL_GEMMAS,
        keys.heads(num_key_value_heads=16, head_dim=256),
        keys.activation("hidden_act", {**keys.GELU_TANH, "gelu": "gelu_tanh"}, "gelu_pytorch_tanh"),
        rope(),
    ),
    names_by="Megatron-Bridge",
)
