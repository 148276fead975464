"""Gemma 2: norms around each block, soft caps, a window in every other layer.

Traps: norms store their factor less one, in both layouts; the embedding is scaled by the root of its width when it
is used, not when it is stored; attention is scaled by `query_pre_attn_scalar`, not by the size of a head.
"""

import math

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import every_other, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama

ROWS = llama.model_rows(*llama.ATTENTION_NORM, *llama.ATTENTION, *llama.AFTER_ATTENTION)

SCALED_EMBEDDING = keys.Rule(
    (),
    lambda config: {
        "embedding_multiplier": math.sqrt(keys.size(config, "hidden_size")),
        "rounded_embedding_multiplier": True,
    },
)

OF_ALL_GEMMAS: tuple[keys.Entry, ...] = (
    *keys.SIZES,
    keys.ATTENTION_BIAS,
    keys.only("use_bidirectional_attention", False),
    keys.always("zero_centered_gamma", True),
    keys.always("hf_zero_centered_gamma", True),
    SCALED_EMBEDDING,
    keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
    keys.tied(True),
)

COMMON: tuple[keys.Entry, ...] = (
    *OF_ALL_GEMMAS,
    keys.heads(num_key_value_heads=4, head_dim=256),
    keys.activation("hidden_activation", keys.GELU_TANH, "gelu_pytorch_tanh"),
    keys.always("post_layernorms", True),
    keys.Key("query_pre_attn_scalar", "query_pre_attn_scalar", 256),
)

ARCHITECTURE = Architecture(
    model_types={"gemma2": "Gemma2ForCausalLM"},
    rows=ROWS,
    config=(
        *COMMON,
        keys.Key("attn_logit_softcapping", "attn_logit_softcapping", None, absent=50.0),
        keys.Key("final_logit_softcapping", "final_logit_softcapping", None, absent=30.0),
        rope(),
        sliding_window(every_other, absent=4096),
    ),
    names_by="Megatron-Bridge",
)
