"""GLM-4-0414: norms before and after attention and MLP, gate and up in one tensor.

Traps: half of each head's channels are rotated, in neighbouring pairs; `post_attention_layernorm` is the norm before
the MLP, and `post_self_attn_layernorm` that after attention.
"""

from precisionctl.architectures.config_keys import SILU, SIZES, Always, Entry, Key, heads, tied
from precisionctl.architectures.param_map import Architecture, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.gemma_rows import POST_ATTENTION_NORM, POST_MLP_NORM
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION,
    ATTENTION_NORM,
    JOINED_MLP,
    MLP_NORM,
    model_rows,
)

COMMON: tuple[Entry, ...] = (
    *SIZES,
    heads(num_key_value_heads=2, head_dim=128),
    SILU,
    Key("qkv_bias", "attention_bias", True),
    Key("norm_epsilon", "rms_norm_eps", 1.5625e-7),
    Always("rotary_interleaved", True),
    rope(percent=0.5, partial=True),
    tied(False),
)

ARCHITECTURE = Architecture(
    model_types={"glm4": "Glm4ForCausalLM"},
    rows=model_rows(
        *ATTENTION_NORM,
        *ATTENTION,
        *renamed(POST_ATTENTION_NORM, {"post_attention_layernorm": "post_self_attn_layernorm"}),
        *MLP_NORM,
        *JOINED_MLP,
        *renamed(POST_MLP_NORM, {"post_feedforward_layernorm": "post_mlp_layernorm"}),
    ),
    config=(*COMMON, Always("post_layernorms", True)),
    names_by="this project",
)
