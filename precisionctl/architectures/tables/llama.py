"""Llama 2 and 3, and Yi, which calls itself `llama`.

Trap: a Llama's `attention_bias` is of all four linears, Megatron's `add_qkv_bias` of three.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama

ARCHITECTURE = Architecture(
    model_types={"llama": "LlamaForCausalLM"},
    rows=llama.model_rows(*llama.ATTENTION_NORM, *llama.ATTENTION, *llama.MLP_NORM, *llama.MLP),
    config=(
        *keys.SIZES,
        keys.HEADS,
        keys.ATTENTION_BIAS,
        keys.SILU,
        keys.Key("mlp_bias", "mlp_bias", False),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        keys.tied(False),
    ),
)
