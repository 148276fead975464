"""Qwen2 and Qwen3, their models with experts, and those of images.

Sources: llama.cpp's src/models/qwen2.cpp, qwen2moe.cpp, qwen2vl.cpp, qwen3.cpp, qwen3moe.cpp, qwen3vl.cpp and
qwen3vlmoe.cpp, and conversion/qwen.py, qwenvl.py and qwen3vl.py.
"""

from dataclasses import replace

from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.mrope_keys import Images

_QWEN2_IMAGES, _QWEN3_IMAGES = Images((16, 24, 24)), Images((24, 20, 20), deepstack=3)

_QWEN2 = GgufFamily(
    "qwen2",
    rows=[*rows.DECODER, *rows.MLP],
    keys=base_keys(head_size=keys.UNUSUAL_HEAD_SIZE),
    computed={"qkv_bias": True},
    ignored=keys.NO_WINDOW,
)
_QWEN2_VL = replace(
    _QWEN2,
    architecture="qwen2vl",
    keys=base_keys(rope=(_QWEN2_IMAGES.sections, rope_keys.ROPE), head_size=keys.UNUSUAL_HEAD_SIZE),
    images=_QWEN2_IMAGES,
)
_QWEN3 = GgufFamily(
    "qwen3",
    rows=[*rows.DECODER, *rows.in_layers(rows.QK_NORMS), *rows.MLP],
    keys=base_keys(),
    reads=(keys.ATTENTION_BIAS,),
    computed={"qk_layernorm": True},
    ignored=keys.NO_WINDOW,
    scaled=rows.SCALED,
)
_QWEN3_VL = replace(
    _QWEN3,
    architecture="qwen3vl",
    keys=base_keys(rope=(_QWEN3_IMAGES.sections, rope_keys.ROPE)),
    more=(_QWEN3_IMAGES.deepstack_layers,),
    scaled=(),
    images=_QWEN3_IMAGES,
)
_QWEN3_MOE = GgufFamily(
    "qwen3moe",
    rows=[*rows.DECODER, *rows.in_layers(rows.QK_NORMS), *rows.ROUTER, *rows.EXPERTS],
    keys=base_keys(*expert_keys.EXPERT_COUNTS),
    more=(expert_keys.EXPERT_SIZE,),
    reads=(keys.ATTENTION_BIAS,),
    computed={**expert_keys.IN_ALL_LAYERS, "qk_layernorm": True},
    ignored=keys.NO_WINDOW,
    scaled=(*rows.SCALED, *rows.SCALED_EXPERTS),
)
_QWEN3_VL_MOE = replace(
    _QWEN3_MOE,
    architecture="qwen3vlmoe",
    keys=base_keys(*expert_keys.EXPERT_COUNTS, rope=(_QWEN3_IMAGES.sections, rope_keys.ROPE)),
    more=(expert_keys.EXPERT_SIZE, _QWEN3_IMAGES.deepstack_layers),
    scaled=(),
    images=_QWEN3_IMAGES,
)

FAMILIES = {
    "qwen2": replace(_QWEN2, in_wrappers=dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _QWEN2_VL)),
    "qwen2_moe": GgufFamily(
        "qwen2moe",
        rows=[*rows.DECODER, *rows.ROUTER, *rows.EXPERTS, *rows.SHARED_EXPERT, *rows.SHARED_EXPERT_GATE],
        keys=base_keys(*expert_keys.EXPERT_COUNTS, head_size=keys.UNUSUAL_HEAD_SIZE),
        more=(expert_keys.EXPERT_SIZE, expert_keys.SHARED_EXPERT_SIZE),
        computed={
            **expert_keys.IN_ALL_LAYERS,
            **dict.fromkeys(("qkv_bias", "moe.pre_softmax", "moe.shared_expert_gate"), True),
            "tied_embeddings": False,
        },
        ignored=keys.NO_WINDOW,
    ),
    "qwen3": replace(_QWEN3, in_wrappers={"qwen3_vl": _QWEN3_VL}),
    "qwen3_moe": replace(_QWEN3_MOE, in_wrappers={"qwen3_vl_moe": _QWEN3_VL_MOE}),
}
