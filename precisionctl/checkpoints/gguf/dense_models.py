"""GGUF's models of newer families with an MLP in each layer, and Gemma 4: what the metadata of each say, and what
llama.cpp computes whatever they say.

Sources: llama.cpp's src/models/*.cpp (load_arch_hparams and graphs), and conversion/*.py (set_gguf_parameters).
"""

from collections.abc import Mapping
from typing import Any

from precisionctl.checkpoints.gguf.gemma4_keys import (
    GEMMA4_COMPUTED,
    GEMMA4_EXPERT_SIZE,
    GEMMA4_EXPERTS,
    GEMMA4_HEAD_SIZE,
    GEMMA4_HEADS,
    GEMMA4_LAYERS,
    GEMMA4_LOCAL_SIZE,
    GEMMA4_MLPS,
    GEMMA4_TURNED,
    GEMMA4_UNUSED,
)
from precisionctl.checkpoints.gguf.gguf_family_keys import FINAL_CAP, HUNYUAN, WINDOW_OF_EXAONE4
from precisionctl.checkpoints.gguf.gguf_keys import (
    HEAD_SIZE,
    LAYER_NORM_EPSILON,
    QKV_BIAS,
    UNUSUAL_HEAD_SIZE,
    VOCABULARY,
    WINDOW,
    GgufKey,
    GgufRule,
    every,
    hidden_by_heads,
    number,
)
from precisionctl.checkpoints.gguf.gguf_model import GgufModel, base_keys
from precisionctl.checkpoints.gguf.gguf_rope import (
    AND_BETAS,
    AND_LLAMA3,
    LOCAL_BASE,
    ROPE,
    STRETCHED,
    TURNED,
    UNSCALED,
    UNSCALED_ALONE,
    WHOLE_MULTIPLIER,
    mscales,
)

_LOGIT_SCALE = number("logit_multiplier", "logit_scale")
_COHERE: Mapping[str, Any] = {
    "kv_channels": hidden_by_heads,
    "normalization": "LayerNorm",
    "norm_bias": False,
    **dict.fromkeys(("tied_embeddings", "parallel_residual", "shared_layernorm", "rotary_interleaved"), True),
}
_QUERY_SCALING = GgufRule(
    ("query_scaling_beta",),
    lambda file: {"query_scaling_beta": file.number("attention.temperature_scale", 0.0) or None},
    lambda model: {"attention.temperature_scale": model.query_scaling_beta or 0.0} if model.rope_scaling else {},
)
"""Ministral 3's: 0 scales none."""

DENSE_MODELS: Mapping[str, GgufModel] = {
    "gemma4_text": GgufModel(
        keys=(
            *base_keys(
                GEMMA4_EXPERTS,
                heads=GgufKey("num_attention_heads", "attention.head_count"),
                rope=(GEMMA4_HEADS, ROPE, LOCAL_BASE),
                mlp=(GEMMA4_MLPS,),
            ),
            GEMMA4_HEAD_SIZE,
        ),
        more=(FINAL_CAP, WINDOW, *GEMMA4_LAYERS, GEMMA4_LOCAL_SIZE, GEMMA4_EXPERT_SIZE, GEMMA4_TURNED),
        reads=(GEMMA4_UNUSED,),
        computed=GEMMA4_COMPUTED,
        scalings={"proportional": ("partial_rotary_factor",)},
    ),
    "seed_oss": GgufModel(keys=(*base_keys(), HEAD_SIZE), more=(QKV_BIAS,)),
    "ernie4_5": GgufModel(keys=(*base_keys(), HEAD_SIZE), computed={"rotary_interleaved": True}),
    "exaone4": GgufModel(
        keys=(*base_keys(), UNUSUAL_HEAD_SIZE),
        more=(VOCABULARY, WINDOW_OF_EXAONE4),
        computed={
            "kv_channels": hidden_by_heads,
            "pre_layernorms": False,
            **dict.fromkeys(("post_layernorms", "qk_layernorm"), True),
        },
        scalings=AND_LLAMA3,
    ),
    "cohere": GgufModel(
        keys=(*base_keys(epsilon=LAYER_NORM_EPSILON), UNUSUAL_HEAD_SIZE),
        more=(_LOGIT_SCALE, UNSCALED),
        computed=_COHERE,
        scalings=UNSCALED_ALONE,
    ),
    "cohere2": GgufModel(
        keys=(*base_keys(epsilon=LAYER_NORM_EPSILON), HEAD_SIZE),
        more=(_LOGIT_SCALE, WINDOW, VOCABULARY, TURNED, UNSCALED),
        reads=(),
        computed={**_COHERE, "rope_layers": every(4), "window_layers": every(4)},
        scalings=UNSCALED_ALONE,
    ),
    "glm4": GgufModel(
        keys=(*base_keys(), HEAD_SIZE),
        more=(TURNED, QKV_BIAS),
        reads=(),
        computed={"post_layernorms": True, "rotary_interleaved": True},
        tokens={"eos": "<|endoftext|>", "eot": "<|user|>", "unk": "<|endoftext|>", "bos": "<|endoftext|>"},
    ),
    "starcoder2": GgufModel(
        keys=(*base_keys(epsilon=LAYER_NORM_EPSILON), UNUSUAL_HEAD_SIZE),
        computed={
            "kv_channels": hidden_by_heads,
            "normalization": "LayerNorm",
            "activation": "gelu_tanh",
            "gated_linear_unit": False,
            **dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), True),
        },
        ignored=("sliding_window", "window_layers"),
    ),
    "hunyuan_v1_dense": GgufModel(keys=(*base_keys(), HEAD_SIZE), reads=(TURNED, STRETCHED), computed=HUNYUAN),
    "ministral3": GgufModel(
        keys=(*base_keys(), HEAD_SIZE),
        more=(VOCABULARY, TURNED, WHOLE_MULTIPLIER, _QUERY_SCALING),
        reads=(),
        ignored=("sliding_window", "window_layers"),
        scalings=AND_BETAS,
        of_scaling=mscales(needed=False),
    ),
}
"""By the `model_type` of the text model."""
