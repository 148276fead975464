"""Youtu-LLM: DeepSeek-V3's latent attention before Llama's MLP.

Trap: the embedding is the head unless config.json says otherwise.
"""

from precisionctl.architectures.config_keys import Key, Only, tied
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.deepseek_keys import ROTATED_HEAD, latent_attention
from precisionctl.architectures.shared.deepseek_rows import ATTENTION
from precisionctl.architectures.shared.llama_rows import MLP, MLP_NORM, model_rows

ARCHITECTURE = Architecture(
    model_types={"youtu": "YoutuForCausalLM"},
    rows=model_rows(*ATTENTION, *MLP_NORM, *MLP),
    config=(
        *latent_attention(1536),
        ROTATED_HEAD,
        Only("rope_interleave", True),
        Only("mlp_bias", False),
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        tied(True),
    ),
)
