"""StarCoder2.

Sources: llama.cpp's src/models/starcoder2.cpp, and conversion/starcoder.py.
"""

from precisionctl.checkpoints.gguf import metadata_keys as keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys

FAMILIES = {
    "starcoder2": GgufFamily(
        "starcoder2",
        rows=[
            *rows.outside_layers(),
            rows.FINAL_NORM_BIAS,
            *rows.linears({**rows.NORMS, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}),
            *rows.ATTENTION,
        ],
        keys=base_keys(epsilon=keys.LAYER_NORM_EPSILON, head_size=keys.UNUSUAL_HEAD_SIZE),
        computed={
            "kv_channels": keys.hidden_by_heads,
            "normalization": "LayerNorm",
            "activation": "gelu_tanh",
            "gated_linear_unit": False,
            **dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), True),
        },
        ignored=keys.NO_WINDOW,
    ),
}
