"""Llama 2 and 3, and Yi, which calls itself `llama`.

Trap: a Llama's `attention_bias` is of all four linears, Megatron's `add_qkv_bias` of three.
"""

from precisionctl.architectures.config_keys import ATTENTION_BIAS, HEADS, SILU, SIZES, Key, tied
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION,
    ATTENTION_NORM,
    MLP,
    MLP_NORM,
    model_rows,
)

ARCHITECTURE = Architecture(
    model_types={"llama": "LlamaForCausalLM"},
    rows=model_rows(*ATTENTION_NORM, *ATTENTION, *MLP_NORM, *MLP),
    config=(
        *SIZES,
        HEADS,
        ATTENTION_BIAS,
        SILU,
        Key("mlp_bias", "mlp_bias", False),
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        tied(False),
    ),
)
