"""Mellum 2.

Sources: llama.cpp's src/models/mellum.cpp, and conversion/mellum.py.
"""

from precisionctl.checkpoints.gguf.expert_keys import EXPERT_COUNTS, EXPERT_SIZE, IN_ALL_LAYERS
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata_keys import (
    HEAD_SIZE,
    NO_PREDICTION,
    WINDOW,
    WINDOWS,
)
from precisionctl.checkpoints.gguf.rope_keys import AS_ELSEWHERE, ROPE, SAME_BASE, TURNED
from precisionctl.checkpoints.gguf.tensor_rows import DECODER, EXPERTS, QK_NORMS, ROUTER, in_layers

FAMILIES = {
    "mellum": GgufFamily(
        "mellum",
        rows=[*DECODER, *in_layers(QK_NORMS), *ROUTER, *EXPERTS],
        keys=(*base_keys(*EXPERT_COUNTS, rope=(ROPE, SAME_BASE)), HEAD_SIZE),
        more=(EXPERT_SIZE, WINDOW, WINDOWS),
        reads=(TURNED,),
        computed={**IN_ALL_LAYERS, **AS_ELSEWHERE, "qk_layernorm": True, "tied_embeddings": False},
        ignored={**NO_PREDICTION, "mtp_dense": False},
    ),
}
"""By the `model_type` of the text model."""
