"""Mamba-2: mixers alone.

Sources: llama.cpp's src/models/mamba2.cpp, and conversion/mamba.py.
"""

from dataclasses import replace

from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.metadata_keys import EPSILON, LAYERS, WIDTH, always, ignored_keys
from precisionctl.checkpoints.gguf.mixers import MIXER_AS_MAMBA2, mixer
from precisionctl.checkpoints.gguf.rope_keys import UNSCALED_ALONE
from precisionctl.checkpoints.gguf.tensor_rows import in_layers, outside_layers, renamed

_NAMES = {"model.embed_tokens.": "backbone.embeddings.", "model.norm.": "backbone.norm_f.", "model.": "backbone."}
_LAYERS = replace(
    LAYERS,
    fields=("num_layers", "mamba.pattern"),
    read=lambda file: {"num_layers": file.layers(), "mamba.pattern": "M" * file.layers()},
)

FAMILIES = {
    "mamba2": GgufFamily(
        "mamba2",
        rows=renamed([*outside_layers(), *in_layers({"norm": "attn_norm"}), *mixer("mixer")], _NAMES),
        keys=(
            ignored_keys("context_length", write=lambda model: {"context_length": 1 << 20}),
            *(WIDTH, always("feed_forward_length", 0), always("attention.head_count", 0)),
            *(_LAYERS, MIXER_AS_MAMBA2, EPSILON),
        ),
        reads=(),
        computed={
            "max_position_embeddings": 262144,  # of which nothing is computed
            **dict.fromkeys(("num_attention_heads", "num_query_groups"), lambda fields: fields["mamba.num_heads"]),
            "kv_channels": lambda fields: fields["mamba.head_dim"],
            "ffn_hidden_size": lambda fields: fields["mamba.num_heads"] * fields["mamba.head_dim"],
            "rope_layers": lambda fields: (False,) * fields["num_layers"],
        },
        scalings=UNSCALED_ALONE,
    ),
}
"""By the `model_type` of the text model."""
