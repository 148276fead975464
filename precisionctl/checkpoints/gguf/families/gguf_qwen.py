"""Qwen2 and Qwen3, their models with experts, and those of images.

Sources: llama.cpp's src/models/qwen2.cpp, qwen2moe.cpp, qwen2vl.cpp, qwen3.cpp, qwen3moe.cpp, qwen3vl.cpp and
qwen3vlmoe.cpp, and conversion/qwen.py, qwenvl.py and qwen3vl.py.
"""

from dataclasses import replace

from precisionctl.checkpoints.gguf.expert_keys import EXPERT_COUNTS, EXPERT_SIZE, IN_ALL_LAYERS, SHARED_EXPERT_SIZE
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata_keys import ATTENTION_BIAS, HEAD_SIZE, NO_WINDOW, UNUSUAL_HEAD_SIZE
from precisionctl.checkpoints.gguf.mrope_keys import Images
from precisionctl.checkpoints.gguf.rope_keys import ROPE, TURNED
from precisionctl.checkpoints.gguf.tensor_rows import (
    DECODER,
    EXPERTS,
    MLP,
    QK_NORMS,
    ROUTER,
    SCALED,
    SCALED_EXPERTS,
    SHARED_EXPERT,
    SHARED_EXPERT_GATE,
    in_layers,
)

_QWEN2_IMAGES, _QWEN3_IMAGES = Images((16, 24, 24)), Images((24, 20, 20), deepstack=3)

_QWEN2 = GgufFamily(
    "qwen2",
    rows=[*DECODER, *MLP],
    keys=(*base_keys(), UNUSUAL_HEAD_SIZE),
    computed={"qkv_bias": True},
    ignored=NO_WINDOW,
)
_QWEN2_VL = replace(
    _QWEN2,
    architecture="qwen2vl",
    keys=(*base_keys(rope=(_QWEN2_IMAGES.sections, ROPE)), UNUSUAL_HEAD_SIZE),
    images=_QWEN2_IMAGES,
)
_QWEN3 = GgufFamily(
    "qwen3",
    rows=[*DECODER, *in_layers(QK_NORMS), *MLP],
    keys=(*base_keys(), HEAD_SIZE),
    reads=(TURNED, ATTENTION_BIAS),
    computed={"qk_layernorm": True},
    ignored=NO_WINDOW,
    scaled=SCALED,
)
_QWEN3_VL = replace(
    _QWEN3,
    architecture="qwen3vl",
    keys=(*base_keys(rope=(_QWEN3_IMAGES.sections, ROPE)), HEAD_SIZE),
    more=(_QWEN3_IMAGES.deepstack_layers,),
    scaled=(),
    images=_QWEN3_IMAGES,
)
_QWEN3_MOE = GgufFamily(
    "qwen3moe",
    rows=[*DECODER, *in_layers(QK_NORMS), *ROUTER, *EXPERTS],
    keys=(*base_keys(*EXPERT_COUNTS), HEAD_SIZE),
    more=(EXPERT_SIZE,),
    reads=(TURNED, ATTENTION_BIAS),
    computed={**IN_ALL_LAYERS, "qk_layernorm": True},
    ignored=NO_WINDOW,
    scaled=(*SCALED, *SCALED_EXPERTS),
)
_QWEN3_VL_MOE = replace(
    _QWEN3_MOE,
    architecture="qwen3vlmoe",
    keys=(*base_keys(*EXPERT_COUNTS, rope=(_QWEN3_IMAGES.sections, ROPE)), HEAD_SIZE),
    more=(EXPERT_SIZE, _QWEN3_IMAGES.deepstack_layers),
    scaled=(),
    images=_QWEN3_IMAGES,
)

FAMILIES = {
    "qwen2": replace(_QWEN2, in_wrappers=dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _QWEN2_VL)),
    "qwen2_moe": GgufFamily(
        "qwen2moe",
        rows=[*DECODER, *ROUTER, *EXPERTS, *SHARED_EXPERT, *SHARED_EXPERT_GATE],
        keys=(*base_keys(*EXPERT_COUNTS), UNUSUAL_HEAD_SIZE),
        more=(EXPERT_SIZE, SHARED_EXPERT_SIZE),
        computed={
            **IN_ALL_LAYERS,
            **dict.fromkeys(("qkv_bias", "moe.pre_softmax", "moe.shared_expert_gate"), True),
            "tied_embeddings": False,
        },
        ignored=NO_WINDOW,
    ),
    "qwen3": replace(_QWEN3, in_wrappers={"qwen3_vl": _QWEN3_VL}),
    "qwen3_moe": replace(_QWEN3_MOE, in_wrappers={"qwen3_vl_moe": _QWEN3_VL_MOE}),
}
"""By the `model_type` of the text model."""
