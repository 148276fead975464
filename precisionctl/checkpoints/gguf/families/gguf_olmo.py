"""OLMo, OLMo 2, OLMo 3 and OLMoE.

Sources: llama.cpp's src/models/olmo.cpp, olmo2.cpp and olmoe.cpp, and conversion/olmo.py.
"""

from collections.abc import Mapping
from typing import Any

from precisionctl.checkpoints.gguf.expert_keys import AS_LARGE_AS_MLP, EXPERT_COUNTS, IN_ALL_LAYERS
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import (
    ATTENTION_BIAS,
    LAYER_NORM_EPSILON,
    QKV_CLAMP,
    UNUSUAL_HEAD_SIZE,
    WINDOW,
    WINDOWS,
    expected,
    hidden_by_heads,
)
from precisionctl.checkpoints.gguf.rope_keys import AS_ELSEWHERE, ROPE, SAME_BASE, TURNED, UNSCALED_ALONE
from precisionctl.checkpoints.gguf.tensor_rows import (
    ATTENTION,
    ATTENTION_IN_PAIRS,
    DECODER,
    EXPERTS,
    MLP,
    NORMS_BEHIND,
    QK_NORMS,
    ROUTER,
    in_layers,
    outside_layers,
)

_ROWS = [*outside_layers(), *in_layers({**NORMS_BEHIND, **QK_NORMS}), *ATTENTION, *MLP]
_COMPUTED: Mapping[str, Any] = {
    "kv_channels": hidden_by_heads,
    "tied_embeddings": False,
    "qk_layernorm": True,
    "qk_layernorm_over_heads": True,
    "pre_layernorms": False,
    "post_layernorms": True,
}


def _has_window(file: Described) -> bool:
    return bool(file.count("attention.sliding_window", 0))


FAMILIES = {
    "olmo": GgufFamily(
        "olmo",
        rows=[*outside_layers(), *ATTENTION_IN_PAIRS, *MLP],
        keys=base_keys(epsilon=None),
        more=(LAYER_NORM_EPSILON, QKV_CLAMP),
        reads=(TURNED,),
        computed={
            "kv_channels": hidden_by_heads,
            "normalization": "LayerNorm",
            "norm_weight": False,
            "norm_bias": False,
            "zero_centered_gamma": True,
        },
        scalings=UNSCALED_ALONE,
    ),
    "olmo2": GgufFamily(
        "olmo2",
        rows=_ROWS,
        keys=(*base_keys(), UNUSUAL_HEAD_SIZE),
        reads=(TURNED, ATTENTION_BIAS, expected("attention.sliding_window", 0)),
        computed=_COMPUTED,
        recognises=lambda file: not _has_window(file),
    ),
    "olmo3": GgufFamily(
        "olmo2",
        rows=_ROWS,
        keys=(*base_keys(rope=(ROPE, SAME_BASE)), UNUSUAL_HEAD_SIZE),
        more=(WINDOW, WINDOWS),
        reads=(TURNED, ATTENTION_BIAS),
        computed={**_COMPUTED, **AS_ELSEWHERE},
        recognises=_has_window,
    ),
    "olmoe": GgufFamily(
        "olmoe",
        rows=[*DECODER, *in_layers(QK_NORMS), *ROUTER, *EXPERTS],
        keys=(*base_keys(*EXPERT_COUNTS), UNUSUAL_HEAD_SIZE),
        computed={
            **IN_ALL_LAYERS,
            **AS_LARGE_AS_MLP,
            **dict.fromkeys(("qk_layernorm", "qk_layernorm_over_heads", "moe.pre_softmax"), True),
            "kv_channels": hidden_by_heads,
            "num_query_groups": lambda fields: fields["num_attention_heads"],
            "tied_embeddings": False,
        },
    ),
}
"""By the `model_type` of the text model."""
