"""Hunyuan: models with an MLP, and with experts; and Hy3.

Sources: llama.cpp's src/models/hunyuan-dense.cpp, hunyuan-moe.cpp and hy-v3.cpp, and conversion/hunyuan.py.
"""

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.expert_keys import (
    AS_LARGE_AS_MLP,
    EXPERT_COUNTS,
    EXPERT_SIZE,
    IN_ALL_LAYERS,
    NORMALISED,
    ONE_SHARED,
    SHARED_EXPERT_SIZE,
    WEIGHTS_SCALE,
    scored_by,
)
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import HEAD_SIZE, LAYERS_AND_PREDICTION, PREDICTION_LAYERS, GgufRule
from precisionctl.checkpoints.gguf.rope_keys import TURNED
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


def _read_stretched(file: Described) -> Fields:
    for key in ("factor", "original_context_length") if file.said("rope.scaling.type") == "none" else ():
        file.said(f"rope.scaling.{key}")
    return {}


_STRETCHED = GgufRule((), _read_stretched)
"""The converter says what stretched the base, which is not scaled."""

_PREDICTION = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head_norm"}


def _read_experts(file: Described) -> Fields:
    """Layers with experts are those that have a router."""
    layers = range(file.decoder_layers())
    return {"moe.layer_freq": tuple(file.has(f"blk.{layer}.ffn_gate_inp.weight") for layer in layers)}


FAMILIES = {
    "hunyuan_v1_dense": GgufFamily(
        "hunyuan-dense",
        rows=[*_DECODER, *MLP],
        keys=(*base_keys(), HEAD_SIZE),
        reads=(TURNED, _STRETCHED),
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
        reads=(TURNED, _STRETCHED),
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
            GgufRule(("moe.layer_freq",), _read_experts),
        ),
        computed={"qk_layernorm": True, "moe.expert_bias": True},
    ),
}
"""By the `model_type` of the text model."""
