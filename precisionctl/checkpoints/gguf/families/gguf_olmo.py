"""OLMo, OLMo 2, OLMo 3 and OLMoE.

Sources: llama.cpp's src/models/olmo.cpp, olmo2.cpp and olmoe.cpp, and conversion/olmo.py.
"""

from collections.abc import Mapping
from typing import Any

from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described

_ROWS = [*rows.outside_layers(), *rows.in_layers({**rows.NORMS_BEHIND, **rows.QK_NORMS}), *rows.ATTENTION, *rows.MLP]
_COMPUTED: Mapping[str, Any] = {
    "kv_channels": keys.hidden_by_heads,
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
        rows=[*rows.outside_layers(), *rows.ATTENTION_IN_PAIRS, *rows.MLP],
        keys=base_keys(epsilon=None, head_size=None),
        more=(keys.LAYER_NORM_EPSILON, keys.QKV_CLAMP),
        computed={
            "kv_channels": keys.hidden_by_heads,
            "normalization": "LayerNorm",
            "norm_weight": False,
            "norm_bias": False,
            "zero_centered_gamma": True,
        },
        scalings=rope_keys.UNSCALED_ALONE,
    ),
    "olmo2": GgufFamily(
        "olmo2",
        rows=_ROWS,
        keys=base_keys(head_size=keys.UNUSUAL_HEAD_SIZE),
        reads=(keys.ATTENTION_BIAS, keys.expected("attention.sliding_window", 0)),
        computed=_COMPUTED,
        recognises=lambda file: not _has_window(file),
    ),
    "olmo3": GgufFamily(
        "olmo2",
        rows=_ROWS,
        keys=base_keys(rope=(rope_keys.ROPE, rope_keys.SAME_BASE), head_size=keys.UNUSUAL_HEAD_SIZE),
        more=(keys.WINDOW, keys.WINDOWS),
        reads=(keys.ATTENTION_BIAS,),
        computed={**_COMPUTED, **rope_keys.AS_ELSEWHERE},
        recognises=_has_window,
    ),
    "olmoe": GgufFamily(
        "olmoe",
        rows=[*rows.DECODER, *rows.in_layers(rows.QK_NORMS), *rows.ROUTER, *rows.EXPERTS],
        keys=base_keys(*expert_keys.EXPERT_COUNTS, head_size=keys.UNUSUAL_HEAD_SIZE),
        computed={
            **expert_keys.IN_ALL_LAYERS,
            **expert_keys.AS_LARGE_AS_MLP,
            **dict.fromkeys(("qk_layernorm", "qk_layernorm_over_heads", "moe.pre_softmax"), True),
            "kv_channels": keys.hidden_by_heads,
            "num_query_groups": keys.SameAs("num_attention_heads"),
            "tied_embeddings": False,
        },
    ),
}
