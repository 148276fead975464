"""Llama 2 and 3, and Yi, which calls itself `llama`.

Trap: a Llama's `attention_bias` is of all four linears, Megatron's `add_qkv_bias` of three.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.shared.llama_keys import llama_keys

ARCHITECTURE = Architecture(
    model_types={"llama": "LlamaForCausalLM"},
    rows=llama.model_rows(*llama.ATTENTION_NORM, *llama.ATTENTION, *llama.MLP_NORM, *llama.MLP),
    config=llama_keys(keys.Key("mlp_bias", "mlp_bias", False), attention_bias=True),
)
