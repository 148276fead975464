"""StarCoder2.

Sources: llama.cpp's src/models/starcoder2.cpp, and conversion/starcoder.py.
"""

from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata_keys import (
    LAYER_NORM_EPSILON,
    NO_WINDOW,
    UNUSUAL_HEAD_SIZE,
    hidden_by_heads,
)
from precisionctl.checkpoints.gguf.tensor_rows import ATTENTION, FINAL_NORM_BIAS, NORMS, linears, outside_layers

FAMILIES = {
    "starcoder2": GgufFamily(
        "starcoder2",
        rows=[
            *outside_layers(),
            FINAL_NORM_BIAS,
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
        ignored=NO_WINDOW,
    ),
}
"""By the `model_type` of the text model."""
