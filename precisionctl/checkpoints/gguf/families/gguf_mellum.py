"""Mellum 2.

Sources: llama.cpp's src/models/mellum.cpp, and conversion/mellum.py.
"""

from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys

FAMILIES = {
    "mellum": GgufFamily(
        "mellum",
        rows=[*rows.DECODER, *rows.in_layers(rows.QK_NORMS), *rows.ROUTER, *rows.EXPERTS],
        keys=base_keys(*expert_keys.EXPERT_COUNTS, rope=(rope_keys.ROPE, rope_keys.SAME_BASE)),
        more=(expert_keys.EXPERT_SIZE, keys.WINDOW, keys.WINDOWS),
        computed={
            **expert_keys.IN_ALL_LAYERS,
            **rope_keys.AS_ELSEWHERE,
            "qk_layernorm": True,
            "tied_embeddings": False,
        },
        ignored={**keys.NO_PREDICTION, "mtp_dense": False},
    ),
}
