"""AFMoE: Trinity.

Sources: llama.cpp's src/models/afmoe.cpp, and conversion/afmoe.py.
"""

import math

from precisionctl.checkpoints.gguf.expert_keys import (
    EXPERT_COUNTS,
    EXPERT_SIZE,
    LEADING_DENSE,
    NORMALISED,
    SHARED_COUNT,
    WEIGHTS_SCALE,
    scored_by,
)
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata_keys import HEAD_SIZE, VOCABULARY, WINDOW, every
from precisionctl.checkpoints.gguf.rope_keys import TURNED
from precisionctl.checkpoints.gguf.tensor_rows import (
    ATTENTION,
    CORRECTION,
    EXPERTS,
    MLP,
    NORMS_BY_PLACE,
    QK_NORMS,
    SHARED_EXPERTS,
    GgufRow,
    in_layers,
    outside_layers,
)

_ROWS = [
    *outside_layers(),
    *ATTENTION,
    *MLP,
    *in_layers(
        {
            **NORMS_BY_PLACE,
            **QK_NORMS,
            "pre_mlp_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            "self_attn.gate_proj": "attn_gate",
            "mlp.router.gate": "ffn_gate_inp",
        }
    ),
    *EXPERTS,
    *SHARED_EXPERTS,
    GgufRow("model.layers.{layer}.mlp.expert_bias", CORRECTION),
]

FAMILIES = {
    "afmoe": GgufFamily(
        "afmoe",
        rows=_ROWS,
        keys=(*base_keys(*EXPERT_COUNTS, scored_by("sigmoid")), HEAD_SIZE),
        more=(VOCABULARY, TURNED, SHARED_COUNT, EXPERT_SIZE, LEADING_DENSE, NORMALISED, WEIGHTS_SCALE, WINDOW),
        reads=(),
        computed={
            **dict.fromkeys(("post_layernorms", "qk_layernorm", "attention_output_gate", "moe.expert_bias"), True),
            "embedding_multiplier": lambda fields: math.sqrt(fields["hidden_size"]),
            "rope_layers": every(4),
            "window_layers": every(4),
        },
        down_last=True,
    ),
}
"""By the `model_type` of the text model."""
