"""MiniMax-M2.

Sources: llama.cpp's src/models/minimax-m2.cpp, and conversion/minimax.py.
"""

from precisionctl.checkpoints.gguf import expert_keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys

FAMILIES = {
    "minimax_m2": GgufFamily(
        "minimax-m2",
        rows=[
            *rows.DECODER,
            *rows.in_layers(rows.QK_NORMS),
            *rows.EXPERTS_OF_MIXTRAL,
            rows.GgufRow("model.layers.{layer}.block_sparse_moe.e_score_correction_bias", rows.CORRECTION),
        ],
        keys=base_keys(*expert_keys.EXPERT_COUNTS, expert_keys.scored_by("sigmoid")),
        more=(expert_keys.EXPERT_SIZE, rope_keys.TURNED),
        computed={
            **expert_keys.IN_ALL_LAYERS,
            **expert_keys.AS_LARGE_AS_MLP,
            **dict.fromkeys(("qk_layernorm", "qk_layernorm_over_heads", "moe.expert_bias"), True),
            "tied_embeddings": False,
        },
    ),
}
