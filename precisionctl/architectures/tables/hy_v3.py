"""Hy3 (Tencent's Hunyuan 3): Qwen3's attention before DeepSeek-V3's experts, without groups.

Traps: published files call router, bias and shared experts otherwise than transformers' class in memory. Their
config.json says `first_k_dense_replace` and `expert_hidden_dim`, by which vLLM goes and transformers does not.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, Either, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.llama_keys import llama_keys

_ATTENTION = (*llama.ATTENTION_NORM, *llama.ATTENTION)
_ROUTING = (*moe.WIDE_ROUTER, *moe.EXPERT_BIAS, *moe.SHARED_EXPERTS)
_PUBLISHED = {
    "mlp.gate.weight": "mlp.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
    "mlp.shared_experts.": "mlp.shared_mlp.",
}
_IN_MEMORY = {"mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias"}
_EITHER = (Either(renamed(_ROUTING, _PUBLISHED), in_memory=renamed(_ROUTING, _IN_MEMORY)),)

_SIZE = keys.synonyms({"expert_hidden_dim": "moe_intermediate_size"})


ARCHITECTURE = Architecture(
    model_types={"hy_v3": "HYV3ForCausalLM"},
    rows=(
        *deepseek_rows.decoder(_ATTENTION, routing=_EITHER),
        *deepseek_rows.prediction(_ATTENTION, _EITHER, "final_layernorm"),
    ),
    config=llama_keys(
        keys.only("mlp_bias", False),
        keys.only("qk_norm", True, "qk_layernorm", True),
        keys.Key("moe.num_experts", "num_experts", synonym="num_local_experts"),
        keys.Key("moe.topk", "num_experts_per_tok", 8),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size"),
        keys.Rule(
            _SIZE.keys, _SIZE.read, lambda model: {"expert_hidden_dim": keys.part_of(model, "moe").ffn_hidden_size}
        ),
        deepseek_keys.shared_experts("num_shared_experts", 1),
        deepseek_keys.experts_by_list(dense=1, key="first_k_dense_replace", reads_key=False),
        keys.only("moe_router_use_sigmoid", True, "moe.score_function", "sigmoid"),
        keys.only("moe_router_enable_expert_bias", True, "moe.expert_bias", True),
        keys.only("route_norm", True),
        keys.Key("moe.topk_scaling_factor", "router_scaling_factor", 2.826),
        heads=keys.heads(num_key_value_heads=8, head_dim=128),
        attention_bias=True,
        epsilon=1e-5,
        rotary=rope(11158840.0),
        after_rotary=(keys.Key("mtp_num_layers", "num_nextn_predict_layers", 0),),
    ),
)
