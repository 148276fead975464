"""Youtu-LLM: DeepSeek-V3's latent attention before Llama's MLP.

Trap: the embedding is the head unless config.json says otherwise.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama

ARCHITECTURE = Architecture(
    model_types={"youtu": "YoutuForCausalLM"},
    rows=llama.model_rows(*deepseek_rows.ATTENTION, *llama.MLP_NORM, *llama.MLP),
    config=(
        *deepseek_keys.latent_attention(1536),
        deepseek_keys.ROTATED_HEAD,
        keys.only("rope_interleave", True),
        keys.only("mlp_bias", False),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        keys.tied(True),
    ),
)
