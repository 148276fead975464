"""gpt-oss. Its experts are `[out, in]` in GGUF, and so under the names that their codes have.

Sources: llama.cpp's src/models/openai-moe.cpp, and conversion/gpt_oss.py.
"""

from precisionctl.checkpoints.gguf.expert_keys import EXPERT_COUNTS, EXPERT_SIZE, IN_ALL_LAYERS
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata_keys import HEAD_SIZE, WINDOW, WINDOWS, every
from precisionctl.checkpoints.gguf.rope_keys import TURNED
from precisionctl.checkpoints.gguf.tensor_rows import (
    ATTENTION,
    NORMS_BY_PLACE,
    GgufRow,
    in_layers,
    linears,
    outside_layers,
    stack,
)
from precisionctl.checkpoints.tensor_changes import GATE_UP_IN_TURNS

_ROWS = [
    *outside_layers(),
    *in_layers(NORMS_BY_PLACE),
    *ATTENTION,
    GgufRow("model.layers.{layer}.self_attn.sinks", ("blk.{layer}.attn_sinks.weight",)),
    *linears({"mlp.router": "ffn_gate_inp"}),
    *(
        row
        for hf, end in {"_blocks": "weight", "_bias": "bias"}.items()
        for row in (
            GgufRow(
                f"model.layers.{{layer}}.mlp.experts.gate_up_proj{hf}[{{expert}}]",
                (stack("ffn_gate_exps", end), stack("ffn_up_exps", end)),
                GATE_UP_IN_TURNS,
            ),
            GgufRow(
                f"model.layers.{{layer}}.mlp.experts.down_proj{hf}[{{expert}}]",
                (stack("ffn_down_exps", end),),
            ),
        )
    ),
]
_BIASES_AND_SINKS = dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias", "softmax_offset", "moe.router_bias"), True)

FAMILIES = {
    "gpt_oss": GgufFamily(
        "gpt-oss",
        rows=_ROWS,
        keys=(*base_keys(*EXPERT_COUNTS), HEAD_SIZE),
        more=(WINDOW, EXPERT_SIZE),
        reads=(TURNED, WINDOWS),
        computed={
            **IN_ALL_LAYERS,
            **_BIASES_AND_SINKS,
            "tied_embeddings": False,
            "activation": "quick_gelu",
            "activation_clamp": 7.0,
            "glu_offset": 1.0,
            "window_layers": every(2),
        },
        of_scaling=lambda scaling: {"truncate": False} if scaling.get("rope_type") == "yarn" else {},
    ),
}
"""By the `model_type` of the text model."""
