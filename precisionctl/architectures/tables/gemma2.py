"""Gemma 2: norms around each block, soft caps, a window in every other layer.

Traps: norms store their factor less one, in both layouts; the embedding is scaled by the root of its width when it
is used, not when it is stored; attention is scaled by `query_pre_attn_scalar`, not by the size of a head.
"""

import math

from precisionctl.architectures.config_keys import (
    ATTENTION_BIAS,
    GELU_TANH,
    SIZES,
    Always,
    Entry,
    Key,
    Only,
    Rule,
    activation,
    heads,
    size,
    tied,
)
from precisionctl.architectures.config_layers import every_other, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.gemma_rows import ROWS

SCALED_EMBEDDING = Rule(
    (),
    lambda config: {
        "embedding_multiplier": math.sqrt(size(config, "hidden_size")),
        "rounded_embedding_multiplier": True,
    },
)

OF_ALL_GEMMAS: tuple[Entry, ...] = (
    *SIZES,
    ATTENTION_BIAS,
    Only("use_bidirectional_attention", False),
    Always("zero_centered_gamma", True),
    Always("hf_zero_centered_gamma", True),
    SCALED_EMBEDDING,
    Key("norm_epsilon", "rms_norm_eps", 1e-6),
    tied(True),
)

COMMON: tuple[Entry, ...] = (
    *OF_ALL_GEMMAS,
    heads(num_key_value_heads=4, head_dim=256),
    activation("hidden_activation", GELU_TANH, "gelu_pytorch_tanh"),
    Always("post_layernorms", True),
    Key("query_pre_attn_scalar", "query_pre_attn_scalar", 256),
)

ARCHITECTURE = Architecture(
    model_types={"gemma2": "Gemma2ForCausalLM"},
    rows=ROWS,
    config=(
        *COMMON,
        Key("attn_logit_softcapping", "attn_logit_softcapping", None, absent=50.0),
        Key("final_logit_softcapping", "final_logit_softcapping", None, absent=30.0),
        rope(),
        sliding_window(every_other, absent=4096),
    ),
    names_by="Megatron-Bridge",
)
