"""Mamba-2: mixers alone.

Sources: llama.cpp's src/models/mamba2.cpp, and conversion/mamba.py.
"""

from dataclasses import replace

from precisionctl.checkpoints.gguf import metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.mixers import MIXER_AS_MAMBA2, mixer

_NAMES = {"model.embed_tokens.": "backbone.embeddings.", "model.norm.": "backbone.norm_f.", "model.": "backbone."}
_LAYERS = replace(
    keys.LAYERS,
    fields=("num_layers", "mamba.pattern"),
    read=lambda file: {"num_layers": file.layers(), "mamba.pattern": "M" * file.layers()},
)

FAMILIES = {
    "mamba2": GgufFamily(
        "mamba2",
        rows=rows.renamed([*rows.outside_layers(), *rows.in_layers({"norm": "attn_norm"}), *mixer("mixer")], _NAMES),
        keys=(
            keys.ignored_keys("context_length", write=lambda model: {"context_length": 1 << 20}),
            *(keys.WIDTH, keys.always("feed_forward_length", 0), keys.always("attention.head_count", 0)),
            *(_LAYERS, MIXER_AS_MAMBA2, keys.EPSILON),
        ),
        reads=(keys.ignored_keys(*rope_keys.TURNED.keys),),
        computed={
            "max_position_embeddings": 262144,  # of which nothing is computed
            **dict.fromkeys(("num_attention_heads", "num_query_groups"), lambda fields: fields["mamba.num_heads"]),
            "kv_channels": lambda fields: fields["mamba.head_dim"],
            "ffn_hidden_size": lambda fields: fields["mamba.num_heads"] * fields["mamba.head_dim"],
            "rope_layers": lambda fields: (False,) * fields["num_layers"],
        },
        scalings=rope_keys.UNSCALED_ALONE,
    ),
}
