"""StarCoder2.

Sources: llama.cpp's src/models/starcoder2.cpp, and conversion/starcoder.py.
"""

from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata_keys import (
    LAYER_NORM_EPSILON,
    UNUSUAL_HEAD_SIZE,
    WINDOW_FIELDS,
    hidden_by_heads,
)
from precisionctl.checkpoints.gguf.tensor_rows import ATTENTION, NORMS, GgufRow, linears, outside_layers

FAMILIES = {
    "starcoder2": GgufFamily(
        "starcoder2",
        rows=[
            *outside_layers(),
            GgufRow("model.norm.bias", ("output_norm.bias",)),
            *linears({**NORMS, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}),
            *ATTENTION,
        ],
        keys=(*base_keys(epsilon=LAYER_NORM_EPSILON), UNUSUAL_HEAD_SIZE),
        computed={
            "kv_channels": hidden_by_heads,
            "normalization": "LayerNorm",
            "activation": "gelu_tanh",
            "gated_linear_unit": False,
            **dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), True),
        },
        ignored=WINDOW_FIELDS,
    ),
}
"""By the `model_type` of the text model."""
