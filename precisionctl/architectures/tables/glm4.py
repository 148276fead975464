"""GLM-4-0414: norms before and after attention and MLP, gate and up in one tensor.

Traps: half of each head's channels are rotated, in neighbouring pairs; `post_attention_layernorm` is the norm before
the MLP, and `post_self_attn_layernorm` that after attention.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.shared.llama_keys import llama_keys

COMMON: tuple[keys.Entry, ...] = llama_keys(
    keys.Key("qkv_bias", "attention_bias", True),
    keys.always("rotary_interleaved", True),
    heads=keys.heads(num_key_value_heads=2, head_dim=128),
    epsilon=1.5625e-7,
    rotary=rope(percent=0.5, partial=True),
)

ARCHITECTURE = Architecture(
    model_types={"glm4": "Glm4ForCausalLM"},
    rows=llama.model_rows(
        *llama.ATTENTION_NORM,
        *llama.ATTENTION,
        *renamed(llama.POST_ATTENTION_NORM, {"post_attention_layernorm": "post_self_attn_layernorm"}),
        *llama.MLP_NORM,
        *llama.JOINED_MLP,
        *renamed(llama.POST_MLP_NORM, {"post_feedforward_layernorm": "post_mlp_layernorm"}),
    ),
    config=(*COMMON, keys.always("post_layernorms", True)),
    names_by="this project",
)
