"""Hunyuan: models with an MLP, and with experts.

Sources: llama.cpp's src/models/hunyuan-dense.cpp and hunyuan-moe.cpp, and conversion/hunyuan.py.
"""

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.expert_keys import (
    AS_LARGE_AS_MLP,
    EXPERT_COUNTS,
    EXPERT_SIZE,
    IN_ALL_LAYERS,
    ONE_SHARED,
    SHARED_EXPERT_SIZE,
)
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import HEAD_SIZE, GgufRule
from precisionctl.checkpoints.gguf.rope_keys import TURNED
from precisionctl.checkpoints.gguf.tensor_rows import ATTENTION, EXPERTS, GATED, MLP, NORMS, in_layers, outside_layers

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
}
"""By the `model_type` of the text model."""
