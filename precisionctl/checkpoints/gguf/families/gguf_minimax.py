"""MiniMax-M2.

Sources: llama.cpp's src/models/minimax-m2.cpp, and conversion/minimax.py.
"""

from precisionctl.checkpoints.gguf.expert_keys import (
    AS_LARGE_AS_MLP,
    EXPERT_COUNTS,
    EXPERT_SIZE,
    IN_ALL_LAYERS,
    scored_by,
)
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata_keys import HEAD_SIZE
from precisionctl.checkpoints.gguf.rope_keys import TURNED
from precisionctl.checkpoints.gguf.tensor_rows import (
    CORRECTION,
    DECODER,
    EXPERTS_OF_MIXTRAL,
    QK_NORMS,
    GgufRow,
    in_layers,
)

FAMILIES = {
    "minimax_m2": GgufFamily(
        "minimax-m2",
        rows=[
            *DECODER,
            *in_layers(QK_NORMS),
            *EXPERTS_OF_MIXTRAL,
            GgufRow("model.layers.{layer}.block_sparse_moe.e_score_correction_bias", CORRECTION),
        ],
        keys=(*base_keys(*EXPERT_COUNTS, scored_by("sigmoid")), HEAD_SIZE),
        more=(EXPERT_SIZE, TURNED),
        reads=(),
        computed={
            **IN_ALL_LAYERS,
            **AS_LARGE_AS_MLP,
            **dict.fromkeys(("qk_layernorm", "qk_layernorm_over_heads", "moe.expert_bias"), True),
            "tied_embeddings": False,
        },
    ),
}
"""By the `model_type` of the text model."""
