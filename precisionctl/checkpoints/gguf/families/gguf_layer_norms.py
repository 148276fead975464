"""StableLM and Phi-2, older models with layer norms.

Sources: llama.cpp's src/models/stablelm.cpp and phi2.cpp, and conversion/stablelm.py and phi.py.
"""

from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.metadata_keys import (
    CONTEXT,
    HEADS,
    LAYER_NORM_EPSILON,
    LAYERS,
    MLP_SIZE,
    QKV_BIAS,
    WIDTH,
    always,
    hidden_by_heads,
)
from precisionctl.checkpoints.gguf.rope_keys import TURNED, UNUSUAL_BASE
from precisionctl.checkpoints.gguf.tensor_rows import (
    ATTENTION,
    FINAL_NORM_BIAS,
    KEY,
    MLP,
    NORMS,
    QUERY,
    GgufRow,
    linears,
    outside_layers,
)

_ONE_AFTER_THE_OTHER = always("use_parallel_residual", False)

FAMILIES = {
    "stablelm": GgufFamily(
        "stablelm",
        rows=[
            *outside_layers(),
            FINAL_NORM_BIAS,
            *linears(NORMS),
            *ATTENTION,
            *MLP,
        ],
        keys=(
            *(CONTEXT, WIDTH, LAYERS, MLP_SIZE, TURNED, HEADS, _ONE_AFTER_THE_OTHER, LAYER_NORM_EPSILON),
            UNUSUAL_BASE,
        ),
        more=(QKV_BIAS,),
        reads=(),
        computed={"kv_channels": hidden_by_heads, "normalization": "LayerNorm", "tied_embeddings": False},
    ),
    "phi": GgufFamily(
        "phi2",
        rows=[
            GgufRow("model.embed_tokens.weight", ("token_embd.weight",)),
            *(
                GgufRow(f"{hf}.{end}", (f"{gguf}.{end}",))
                for hf, gguf in {"model.final_layernorm": "output_norm", "lm_head": "output"}.items()
                for end in ("weight", "bias")
            ),
            *linears({"input_layernorm": "attn_norm", **QUERY, **KEY, "self_attn.v_proj": "attn_v"}),
            *linears({"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}),
        ],
        keys=(CONTEXT, WIDTH, MLP_SIZE, LAYERS, HEADS, LAYER_NORM_EPSILON, TURNED, UNUSUAL_BASE),
        reads=(),
        computed={
            "kv_channels": hidden_by_heads,
            "normalization": "LayerNorm",
            "activation": "gelu_tanh",
            **dict.fromkeys(("gated_linear_unit", "tied_embeddings"), False),
            **dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias", "output_bias"), True),
            **dict.fromkeys(("parallel_residual", "shared_layernorm"), True),
        },
    ),
}
"""By the `model_type` of the text model."""
