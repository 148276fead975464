"""AFMoE (Arcee's Trinity): norms before and after attention and MLP, an output gate, DeepSeek-V3's experts; a window in
three layers of four, and no rotary embeddings in the others.

Traps: the gate is a projection of its own; `post_attention_layernorm` is the norm after attention, and
`pre_mlp_layernorm` that before the MLP. `layer_types` says where rotary embeddings are, whether or not there is a
window.
"""

from precisionctl.architectures.config_keys import (
    SILU,
    SIZES,
    Always,
    Config,
    Fields,
    Key,
    Only,
    Rule,
    heads,
    is_on,
    size,
    tied,
)
from precisionctl.architectures.config_layers import all_but_every, layer_types, layers_with_window, sliding_window
from precisionctl.architectures.head_rearrangements import QGKV
from precisionctl.architectures.param_map import Architecture, Row, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.deepseek_keys import leading_dense, shared_experts
from precisionctl.architectures.shared.deepseek_rows import decoder
from precisionctl.architectures.shared.gemma_rows import POST_ATTENTION_NORM, POST_MLP_NORM
from precisionctl.architectures.shared.llama_rows import ATTENTION_NORM, PROJ, QK_NORMS
from precisionctl.architectures.shared.moe_rows import POST_MOE_NORM
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import ROWS

_LOCAL = all_but_every(4, "global_attn_every_n_layers")
_LENGTH = 1024  # where none is said
_WINDOW = sliding_window(_LOCAL, absent=_LENGTH, also=("global_attn_every_n_layers",))

_RENAMED = {
    "mlp.gate.weight": "mlp.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
    "post_attention_layernorm": "pre_mlp_layernorm",
}


def _read_layers(config: Config) -> Fields:
    in_window = layers_with_window(config, _LOCAL, _LENGTH)
    return {**_WINDOW.read(config), "rope_layers": tuple(in_window)}


def _write_layers(model: ModelShape) -> Config:
    return {**_WINDOW.write(model), "layer_types": layer_types(model)}


def _read_scale(config: Config) -> Fields:
    scaled = is_on(config, "mup_enabled")
    return {"embedding_multiplier": size(config, "hidden_size") ** 0.5 if scaled else 1.0}


def _write_scale(model: ModelShape) -> Config:
    return {"mup_enabled": model.embedding_multiplier != 1}


GATED_QKV = Row(
    tuple(f"model.layers.{{layer}}.self_attn.{each}_proj.weight" for each in ("q", "gate", "k", "v")),
    "decoder.layers.{layer}.self_attention.linear_qkv.weight",
    ("qkv_size", "hidden_size"),
    QGKV,
    ROWS,
    gemm=True,
)

_ATTENTION = (*ATTENTION_NORM, GATED_QKV, *QK_NORMS, *PROJ)
_NORMS_AFTER = (*POST_ATTENTION_NORM, *renamed((*POST_MLP_NORM, *POST_MOE_NORM), {"post_feedforward": "post_mlp"}))

ARCHITECTURE = Architecture(
    model_types={"afmoe": "AfmoeForCausalLM"},
    behind={"mlp": "post_mlp_layernorm", "experts": "shared_experts"},
    rows=(*(row.renamed(_RENAMED) for row in decoder(_ATTENTION)), *_NORMS_AFTER),
    config=(
        *SIZES,
        heads(head_dim=128),
        SILU,
        Only("attention_bias", False),
        Always("qk_layernorm", True),
        Always("attention_output_gate", True),
        Always("post_layernorms", True),
        Rule(("mup_enabled",), _read_scale, _write_scale),
        Key("moe.num_experts", "num_experts"),
        Key("moe.topk", "num_experts_per_tok", 6),
        Key("moe.ffn_hidden_size", "moe_intermediate_size"),
        shared_experts("num_shared_experts", 2),
        leading_dense("num_dense_layers", 1),
        Only("score_func", "sigmoid", "moe.score_function", "sigmoid"),
        Always("moe.expert_bias", True),
        Only("route_norm", True),
        Only("n_group", 1),
        Only("topk_group", 1),
        Key("moe.topk_scaling_factor", "route_scale", 1.0),
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(),
        Rule(_WINDOW.keys, _read_layers, _write_layers),
        tied(False),
    ),
    names_by="this project",
)
