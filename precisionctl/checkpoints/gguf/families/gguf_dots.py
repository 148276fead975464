"""dots.llm1.

Sources: llama.cpp's src/models/dots1.cpp, and conversion/dots1.py.
"""

from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys

FAMILIES = {
    "dots1": GgufFamily(
        "dots1",
        rows=[
            *rows.DECODER,
            *rows.in_layers(rows.QK_NORMS),
            *rows.MLP,
            *rows.ROUTER,
            rows.EXPERT_BIAS,
            *rows.EXPERTS,
            *rows.SHARED_EXPERTS,
        ],
        keys=base_keys(
            *expert_keys.DEEPSEEK_CHOICE,
            head_size=keys.UNUSUAL_HEAD_SIZE,
        ),
        more=(
            expert_keys.EXPERT_SIZE,
            expert_keys.LEADING_DENSE,
            expert_keys.SHARED_COUNT,
            expert_keys.WEIGHTS_SCALE,
            expert_keys.NORMALISED,
        ),
        computed={
            "num_query_groups": keys.SameAs("num_attention_heads"),
            "qk_layernorm": True,
            "moe.expert_bias": True,
            "tied_embeddings": False,
            **dict.fromkeys(("moe.num_groups", "moe.group_topk", "moe.group_scores")),
        },
    ),
}
