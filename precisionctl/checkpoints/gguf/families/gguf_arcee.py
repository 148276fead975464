"""Arcee: AFM-4.5B, and AFMoE (Trinity).

Sources: llama.cpp's src/models/arcee.cpp and afmoe.cpp, and conversion/llama.py and afmoe.py.
"""

import math

from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys

_ROWS = [
    *rows.outside_layers(),
    *rows.ATTENTION,
    *rows.MLP,
    *rows.in_layers(
        {
            **rows.NORMS_BY_PLACE,
            **rows.QK_NORMS,
            "pre_mlp_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            "self_attn.gate_proj": "attn_gate",
            "mlp.router.gate": "ffn_gate_inp",
        }
    ),
    *rows.EXPERTS,
    *rows.SHARED_EXPERTS,
    rows.GgufRow("model.layers.{layer}.mlp.expert_bias", rows.CORRECTION),
]

FAMILIES = {
    "arcee": GgufFamily(
        "arcee",
        rows=[*rows.DECODER_IN_PAIRS, *rows.UNGATED_MLP],
        keys=base_keys(),
        more=(keys.VOCABULARY, rope_keys.TURNED),
        computed={"activation": "squared_relu", "gated_linear_unit": False},
        scalings=rope_keys.AND_LLAMA3,
    ),
    "afmoe": GgufFamily(
        "afmoe",
        rows=_ROWS,
        keys=base_keys(*expert_keys.EXPERT_COUNTS, expert_keys.scored_by("sigmoid")),
        more=(
            keys.VOCABULARY,
            rope_keys.TURNED,
            expert_keys.SHARED_COUNT,
            expert_keys.EXPERT_SIZE,
            expert_keys.LEADING_DENSE,
            expert_keys.NORMALISED,
            expert_keys.WEIGHTS_SCALE,
            keys.WINDOW,
        ),
        computed={
            **dict.fromkeys(("post_layernorms", "qk_layernorm", "attention_output_gate", "moe.expert_bias"), True),
            "embedding_multiplier": lambda fields: math.sqrt(fields["hidden_size"]),
            "rope_layers": keys.every(4),
            "window_layers": keys.every(4),
        },
        down_last=True,
    ),
}
