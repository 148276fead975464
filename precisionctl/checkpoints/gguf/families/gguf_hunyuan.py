"""Hunyuan: models with an MLP, and with experts; and Hy3.

Sources: llama.cpp's src/models/hunyuan-dense.cpp, hunyuan-moe.cpp and hy-v3.cpp, and conversion/hunyuan.py.
"""

from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys

_NORMS = {
    **rows.NORMS,
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
}
_DECODER = [*rows.outside_layers(), *rows.in_layers(_NORMS), *rows.ATTENTION]
_COMPUTED = dict.fromkeys(("qk_layernorm", "qk_layernorm_after_rope"), True)


_PREDICTION = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head_norm"}

FAMILIES = {
    "hunyuan_v1_dense": GgufFamily(
        "hunyuan-dense",
        rows=[*_DECODER, *rows.MLP],
        keys=base_keys(),
        computed=_COMPUTED,
    ),
    "hunyuan_v1_moe": GgufFamily(
        "hunyuan-moe",
        rows=[
            *_DECODER,
            *rows.in_layers({"mlp.gate.wg": "ffn_gate_inp"}),
            *rows.shared_expert("mlp.shared_mlp"),
            *rows.EXPERTS,
        ],
        keys=base_keys(expert_keys.EXPERT_COUNTS[0]),
        more=(
            expert_keys.SHARED_EXPERT_SIZE,
            expert_keys.EXPERT_SIZE,
            expert_keys.EXPERT_COUNTS[1],
            expert_keys.ONE_SHARED,
        ),
        computed={
            **expert_keys.IN_ALL_LAYERS,
            **expert_keys.AS_LARGE_AS_MLP,
            **_COMPUTED,
            "moe.shared_ffn_hidden_size": keys.SameAs("ffn_hidden_size"),
        },
    ),
    "hy_v3": GgufFamily(
        "hy_v3",
        rows=[
            *rows.DECODER,
            *rows.in_layers(rows.QK_NORMS),
            *rows.MLP,
            *rows.in_layers({"mlp.router.gate": "ffn_gate_inp"}),
            rows.in_layer("mlp.expert_bias", "exp_probs_b"),
            *rows.EXPERTS,
            *rows.shared_expert("mlp.shared_mlp"),
            *rows.in_layers({hf: f"nextn.{gguf}" for hf, gguf in _PREDICTION.items()}),
        ],
        keys=base_keys(*expert_keys.EXPERT_COUNTS, layers=keys.LAYERS_AND_PREDICTION),
        more=(
            expert_keys.EXPERT_SIZE,
            expert_keys.SHARED_EXPERT_SIZE,
            expert_keys.NORMALISED,
            expert_keys.WEIGHTS_SCALE,
            expert_keys.scored_by("sigmoid"),
            keys.PREDICTION_LAYERS,
            expert_keys.ROUTED_LAYERS,
        ),
        computed={"qk_layernorm": True, "moe.expert_bias": True},
    ),
}
