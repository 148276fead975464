"""Qwen2 and Qwen3, and their models with experts.

Sources: llama.cpp's src/models/qwen2.cpp, qwen2moe.cpp, qwen3.cpp and qwen3moe.cpp, and conversion/qwen.py.
"""

from precisionctl.checkpoints.gguf.expert_keys import EXPERT_COUNTS, EXPERT_SIZE, IN_ALL_LAYERS, SHARED_EXPERT_SIZE
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.keys import ATTENTION_BIAS, HEAD_SIZE, UNUSUAL_HEAD_SIZE, WINDOW_FIELDS
from precisionctl.checkpoints.gguf.rope_keys import TURNED
from precisionctl.checkpoints.gguf.rows import (
    DECODER,
    EXPERTS,
    MLP,
    QK_NORMS,
    ROUTER,
    SHARED_EXPERT,
    SHARED_EXPERT_GATE,
    in_layers,
)

FAMILIES = {
    "qwen2": GgufFamily(
        "qwen2",
        rows=[*DECODER, *MLP],
        keys=(*base_keys(), UNUSUAL_HEAD_SIZE),
        computed={"qkv_bias": True},
        ignored=WINDOW_FIELDS,
    ),
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
        ignored=WINDOW_FIELDS,
    ),
    "qwen3": GgufFamily(
        "qwen3",
        rows=[*DECODER, *in_layers(QK_NORMS), *MLP],
        keys=(*base_keys(), HEAD_SIZE),
        reads=(TURNED, ATTENTION_BIAS),
        computed={"qk_layernorm": True},
        ignored=WINDOW_FIELDS,
    ),
    "qwen3_moe": GgufFamily(
        "qwen3moe",
        rows=[*DECODER, *in_layers(QK_NORMS), *ROUTER, *EXPERTS],
        keys=(*base_keys(*EXPERT_COUNTS), HEAD_SIZE),
        more=(EXPERT_SIZE,),
        reads=(TURNED, ATTENTION_BIAS),
        computed={**IN_ALL_LAYERS, "qk_layernorm": True},
        ignored=WINDOW_FIELDS,
    ),
}
"""By the `model_type` of the text model."""
