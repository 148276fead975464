"""dots.llm1.

Sources: llama.cpp's src/models/dots1.cpp, and conversion/dots1.py.
"""

from precisionctl.checkpoints.gguf.expert_keys import (
    EXPERT_COUNTS,
    EXPERT_SIZE,
    LEADING_DENSE,
    NORMALISED,
    SHARED_COUNT,
    WEIGHTS_SCALE,
    groups,
    scored_by,
)
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata_keys import HEAD_SIZE
from precisionctl.checkpoints.gguf.tensor_rows import (
    DECODER,
    EXPERT_BIAS,
    EXPERTS,
    MLP,
    QK_NORMS,
    ROUTER,
    SHARED_EXPERTS,
    in_layers,
)

FAMILIES = {
    "dots1": GgufFamily(
        "dots1",
        rows=[*DECODER, *in_layers(QK_NORMS), *MLP, *ROUTER, EXPERT_BIAS, *EXPERTS, *SHARED_EXPERTS],
        keys=(*base_keys(*EXPERT_COUNTS, groups(2), scored_by("sigmoid")), HEAD_SIZE),
        more=(EXPERT_SIZE, LEADING_DENSE, SHARED_COUNT, WEIGHTS_SCALE, NORMALISED),
        computed={
            "num_query_groups": lambda fields: fields["num_attention_heads"],
            "qk_layernorm": True,
            "moe.expert_bias": True,
            "tied_embeddings": False,
            **dict.fromkeys(("moe.num_groups", "moe.group_topk", "moe.group_scores")),
        },
    ),
}
"""By the `model_type` of the text model."""
