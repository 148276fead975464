"""gpt-oss. Its experts are `[out, in]` in GGUF, and so under the names that their codes have.

Sources: llama.cpp's src/models/openai-moe.cpp, and conversion/gpt_oss.py.
"""

from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.tensor_changes import GATE_UP_IN_TURNS

_ROWS = [
    *rows.outside_layers(),
    *rows.in_layers(rows.NORMS_BY_PLACE),
    *rows.ATTENTION,
    rows.GgufRow("model.layers.{layer}.self_attn.sinks", ("blk.{layer}.attn_sinks.weight",)),
    *rows.linears({"mlp.router": "ffn_gate_inp"}),
    *(
        row
        for hf, end in {"_blocks": "weight", "_bias": "bias"}.items()
        for row in (
            rows.GgufRow(
                f"model.layers.{{layer}}.mlp.experts.gate_up_proj{hf}[{{expert}}]",
                (rows.stack("ffn_gate_exps", end), rows.stack("ffn_up_exps", end)),
                GATE_UP_IN_TURNS,
            ),
            rows.GgufRow(
                f"model.layers.{{layer}}.mlp.experts.down_proj{hf}[{{expert}}]",
                (rows.stack("ffn_down_exps", end),),
            ),
        )
    ),
]
_BIASES_AND_SINKS = dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias", "softmax_offset", "moe.router_bias"), True)

FAMILIES = {
    "gpt_oss": GgufFamily(
        "gpt-oss",
        rows=_ROWS,
        keys=base_keys(*expert_keys.EXPERT_COUNTS),
        more=(keys.WINDOW, expert_keys.EXPERT_SIZE),
        reads=(keys.WINDOWS,),
        computed={
            **expert_keys.IN_ALL_LAYERS,
            **_BIASES_AND_SINKS,
            "tied_embeddings": False,
            "activation": "quick_gelu",
            "activation_clamp": 7.0,
            "glu_offset": 1.0,
            "window_layers": keys.every(2),
        },
        of_scaling=lambda scaling: {"truncate": False} if scaling.get("rope_type") == "yarn" else {},
    ),
}
