"""StableLM, Phi-2 and StarCoder2, older models with layer norms.

Sources: llama.cpp's src/models/stablelm.cpp, phi2.cpp and starcoder2.cpp, and conversion/stablelm.py, phi.py and
starcoder.py.
"""

from precisionctl.checkpoints.gguf import metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys

_ONE_AFTER_THE_OTHER = keys.always("use_parallel_residual", False)

FAMILIES = {
    "stablelm": GgufFamily(
        "stablelm",
        rows=[
            *rows.outside_layers(),
            rows.FINAL_NORM_BIAS,
            *rows.linears(rows.NORMS),
            *rows.ATTENTION,
            *rows.MLP,
        ],
        keys=(
            keys.CONTEXT,
            keys.WIDTH,
            keys.LAYERS,
            keys.MLP_SIZE,
            rope_keys.TURNED,
            keys.HEADS,
            _ONE_AFTER_THE_OTHER,
            keys.LAYER_NORM_EPSILON,
            rope_keys.UNUSUAL_BASE,
        ),
        more=(keys.QKV_BIAS,),
        computed={"kv_channels": keys.hidden_by_heads, "normalization": "LayerNorm", "tied_embeddings": False},
    ),
    "phi": GgufFamily(
        "phi2",
        rows=[
            rows.GgufRow("model.embed_tokens.weight", ("token_embd.weight",)),
            *(
                rows.GgufRow(f"{hf}.{end}", (f"{gguf}.{end}",))
                for hf, gguf in {"model.final_layernorm": "output_norm", "lm_head": "output"}.items()
                for end in ("weight", "bias")
            ),
            *rows.linears({"input_layernorm": "attn_norm", **rows.QUERY, **rows.KEY, "self_attn.v_proj": "attn_v"}),
            *rows.linears({"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}),
        ],
        keys=(
            keys.CONTEXT,
            keys.WIDTH,
            keys.MLP_SIZE,
            keys.LAYERS,
            keys.HEADS,
            keys.LAYER_NORM_EPSILON,
            rope_keys.TURNED,
            rope_keys.UNUSUAL_BASE,
        ),
        computed={
            "kv_channels": keys.hidden_by_heads,
            "normalization": "LayerNorm",
            "activation": "gelu_tanh",
            **dict.fromkeys(("gated_linear_unit", "tied_embeddings"), False),
            **dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias", "output_bias"), True),
            **dict.fromkeys(("parallel_residual", "shared_layernorm"), True),
        },
    ),
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
