"""AFMoE (Arcee's Trinity): norms before and after attention and MLP, an output gate, DeepSeek-V3's experts; a window in
three layers of four, and no rotary embeddings in the others.

Traps: the gate is a projection of its own; `post_attention_layernorm` is the norm after attention, and
`pre_mlp_layernorm` that before the MLP. `layer_types` says where rotary embeddings are, whether or not there is a
window.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import all_but_every, layer_types, layers_in_window, sliding_window
from precisionctl.architectures.head_rearrangements import QGKV
from precisionctl.architectures.param_map import Architecture, Row, renamed
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.param import ROWS

_LOCAL = all_but_every(4, "global_attn_every_n_layers")
_WINDOW = sliding_window(_LOCAL, absent=1024, also=("global_attn_every_n_layers",))

_RENAMED = {
    "mlp.gate.weight": "mlp.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
    "post_attention_layernorm": "pre_mlp_layernorm",
}


def _read_scale(config: keys.Config) -> keys.Fields:
    scaled = keys.is_on(config, "mup_enabled")
    return {"embedding_multiplier": keys.size(config, "hidden_size") ** 0.5 if scaled else 1.0}


GATED_QKV = Row(
    tuple(f"model.layers.{{layer}}.self_attn.{each}_proj.weight" for each in ("q", "gate", "k", "v")),
    "decoder.layers.{layer}.self_attention.linear_qkv.weight",
    ("qkv_size", "hidden_size"),
    QGKV,
    ROWS,
    gemm=True,
)

_ATTENTION = (*llama.ATTENTION_NORM, GATED_QKV, *llama.QK_NORMS, *llama.PROJ)
_NORMS_AFTER = (
    *llama.POST_ATTENTION_NORM,
    *renamed((*llama.POST_MLP_NORM, *moe.POST_MOE_NORM), {"post_feedforward": "post_mlp"}),
)

ARCHITECTURE = Architecture(
    model_types={"afmoe": "AfmoeForCausalLM"},
    behind={"mlp": "post_mlp_layernorm", "experts": "shared_experts"},
    rows=(*(row.renamed(_RENAMED) for row in deepseek_rows.decoder(_ATTENTION)), *_NORMS_AFTER),
    config=llama_keys(
        keys.only("attention_bias", False),
        keys.always("qk_layernorm", True),
        keys.always("attention_output_gate", True),
        keys.always("post_layernorms", True),
        keys.Rule(
            ("mup_enabled",),
            _read_scale,
            lambda model: {"mup_enabled": model.embedding_multiplier != 1},
        ),
        keys.Key("moe.num_experts", "num_experts"),
        keys.Key("moe.topk", "num_experts_per_tok", 6),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size"),
        deepseek_keys.shared_experts("num_shared_experts", 2),
        deepseek_keys.leading_dense("num_dense_layers", 1),
        keys.only("score_func", "sigmoid", "moe.score_function", "sigmoid"),
        keys.always("moe.expert_bias", True),
        keys.only("route_norm", True),
        keys.only("n_group", 1),
        keys.only("topk_group", 1),
        keys.Key("moe.topk_scaling_factor", "route_scale", 1.0),
        heads=keys.heads(head_dim=128),
        epsilon=1e-5,
        after_rotary=(
            keys.Rule(
                _WINDOW.keys,
                lambda config: {**_WINDOW.read(config), "rope_layers": tuple(layers_in_window(config, _LOCAL))},
                lambda model: {**_WINDOW.write(model), "layer_types": layer_types(model)},
            ),
        ),
    ),
    names_by="this project",
)
