"""Hy3 (Tencent's Hunyuan 3): Qwen3's attention before DeepSeek-V3's experts, without groups.

Traps: published files call router, bias and shared experts otherwise than transformers' class in memory. Their
config.json says `first_k_dense_replace` and `expert_hidden_dim`, by which vLLM goes and transformers does not.
"""

from precisionctl.architectures.config_keys import (
    ATTENTION_BIAS,
    SILU,
    SIZES,
    Config,
    Key,
    Only,
    Rule,
    Synonyms,
    heads,
    tied,
)
from precisionctl.architectures.param_map import Architecture, Either, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.deepseek_keys import experts_by_list, shared_experts
from precisionctl.architectures.shared.deepseek_rows import decoder, prediction
from precisionctl.architectures.shared.llama_rows import ATTENTION, ATTENTION_NORM
from precisionctl.architectures.shared.moe_rows import EXPERT_BIAS, ROUTER, SHARED_EXPERTS
from precisionctl.model.model_shape import ModelShape

_ATTENTION = (*ATTENTION_NORM, *ATTENTION)
_ROUTING = (*ROUTER, *EXPERT_BIAS, *SHARED_EXPERTS)
_PUBLISHED = {
    "mlp.gate.weight": "mlp.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
    "mlp.shared_experts.": "mlp.shared_mlp.",
}
_IN_MEMORY = {"mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias"}
_EITHER = (Either(renamed(_ROUTING, _PUBLISHED), renamed(_ROUTING, _IN_MEMORY), second_is="in memory"),)

_SIZE = Synonyms({"expert_hidden_dim": "moe_intermediate_size"})


def _write_size(model: ModelShape) -> Config:
    return {"expert_hidden_dim": model.moe.ffn_hidden_size} if model.moe else {}


ARCHITECTURE = Architecture(
    model_types={"hy_v3": "HYV3ForCausalLM"},
    rows=(*decoder(_ATTENTION, routing=_EITHER), *prediction(_ATTENTION, _EITHER, "final_layernorm")),
    config=(
        *SIZES,
        heads(num_key_value_heads=8, head_dim=128),
        ATTENTION_BIAS,
        SILU,
        Only("mlp_bias", False),
        Only("qk_norm", True, "qk_layernorm", True),
        Key("moe.num_experts", "num_experts", synonym="num_local_experts"),
        Key("moe.topk", "num_experts_per_tok", 8),
        Key("moe.ffn_hidden_size", "moe_intermediate_size"),
        Rule(_SIZE.keys, _SIZE.read, _write_size),
        shared_experts("num_shared_experts", 1),
        experts_by_list(dense=1, key="first_k_dense_replace", reads_key=False),
        Only("moe_router_use_sigmoid", True, "moe.score_function", "sigmoid"),
        Only("moe_router_enable_expert_bias", True, "moe.expert_bias", True),
        Only("route_norm", True),
        Key("moe.topk_scaling_factor", "router_scaling_factor", 2.826),
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(11158840.0),
        Key("mtp_num_layers", "num_nextn_predict_layers", 0),
        tied(False),
    ),
)
