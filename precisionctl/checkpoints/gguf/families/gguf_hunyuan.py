"""Hunyuan: models with an MLP, and with experts; and Hy3.

Sources: llama.cpp's src/models/hunyuan-dense.cpp, hunyuan-moe.cpp and hy-v3.cpp, and conversion/hunyuan.py.
"""

from precisionctl.checkpoints.gguf.expert_keys import (
    AS_LARGE_AS_MLP,
    EXPERT_COUNTS,
    EXPERT_SIZE,
    IN_ALL_LAYERS,
    NORMALISED,
    ONE_SHARED,
    ROUTED_LAYERS,
    SHARED_EXPERT_SIZE,
    WEIGHTS_SCALE,
    scored_by,
)
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata_keys import HEAD_SIZE, LAYERS_AND_PREDICTION, PREDICTION_LAYERS
from precisionctl.checkpoints.gguf.tensor_rows import (
    ATTENTION,
    DECODER,
    EXPERTS,
    GATED,
    MLP,
    NORMS,
    QK_NORMS,
    in_layer,
    in_layers,
    outside_layers,
)

_NORMS = {
    **NORMS,
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
}
_DECODER = [*outside_layers(), *in_layers(_NORMS), *ATTENTION]
_COMPUTED = dict.fromkeys(("qk_layernorm", "qk_layernorm_after_rope"), True)


_PREDICTION = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head_norm"}

FAMILIES = {
    "hunyuan_v1_dense": GgufFamily(
        "hunyuan-dense",
        rows=[*_DECODER, *MLP],
        keys=(*base_keys(), HEAD_SIZE),
        computed=_COMPUTED,
    ),
    "hunyuan_v1_moe": GgufFamily(
        "hunyuan-moe",
        rows=[
            *_DECODER,
            *in_layers({"mlp.gate.wg": "ffn_gate_inp"}),
            *in_layers({f"mlp.shared_mlp.{hf}": f"{gguf}_shexp" for hf, gguf in GATED.items()}),
            *EXPERTS,
        ],
        keys=(*base_keys(EXPERT_COUNTS[0]), HEAD_SIZE),
        more=(SHARED_EXPERT_SIZE, EXPERT_SIZE, EXPERT_COUNTS[1], ONE_SHARED),
        computed={
            **IN_ALL_LAYERS,
            **AS_LARGE_AS_MLP,
            **_COMPUTED,
            "moe.shared_ffn_hidden_size": lambda fields: fields["ffn_hidden_size"],
        },
    ),
    "hy_v3": GgufFamily(
        "hy_v3",
        rows=[
            *DECODER,
            *in_layers(QK_NORMS),
            *MLP,
            *in_layers({"mlp.router.gate": "ffn_gate_inp"}),
            in_layer("mlp.expert_bias", "exp_probs_b"),
            *EXPERTS,
            *in_layers({f"mlp.shared_mlp.{hf}": f"{gguf}_shexp" for hf, gguf in GATED.items()}),
            *in_layers({hf: f"nextn.{gguf}" for hf, gguf in _PREDICTION.items()}),
        ],
        keys=(*base_keys(*EXPERT_COUNTS, layers=LAYERS_AND_PREDICTION), HEAD_SIZE),
        more=(
            *(EXPERT_SIZE, SHARED_EXPERT_SIZE, NORMALISED, WEIGHTS_SCALE, scored_by("sigmoid"), PREDICTION_LAYERS),
            ROUTED_LAYERS,
        ),
        computed={"qk_layernorm": True, "moe.expert_bias": True},
    ),
}
"""By the `model_type` of the text model."""
