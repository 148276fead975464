"""K-EXAONE: EXAONE 4's attention, with norms before and not after it, and DeepSeek-V3's experts.

Traps: the bias that chooses experts is not the router's in published files. Their layer of multi-token prediction,
`mtp.*`, which transformers leaves out, has no experts, whatever the decoder's layers have (vLLM and Megatron-Bridge
build it so).
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
    one_or_none,
    tied,
)
from precisionctl.architectures.param_map import Architecture, Either, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.deepseek_keys import experts_by_list, groups, shared_experts
from precisionctl.architectures.shared.deepseek_rows import decoder
from precisionctl.architectures.shared.delta_net_rows import DENSE, prediction
from precisionctl.architectures.shared.llama_rows import ATTENTION, ATTENTION_NORM
from precisionctl.architectures.shared.moe_rows import EXPERT_BIAS, ROUTER, SHARED_EXPERTS
from precisionctl.architectures.tables.exaone4 import WINDOWS
from precisionctl.model.model_shape import ModelShape

_BIAS = Either(renamed(EXPERT_BIAS, {"mlp.gate.": "mlp."}), EXPERT_BIAS, second_is="in memory")


def _read_prediction(config: Config) -> Fields:
    number = one_or_none(config, "num_nextn_predict_layers")
    return {"mtp_num_layers": number, "mtp_dense": bool(number)}


def _write_prediction(model: ModelShape) -> Config:
    return {"num_nextn_predict_layers": model.mtp_num_layers}


def _write_experts(model: ModelShape) -> Config:
    """By which SGLang goes."""
    return {"is_moe_layer": [model.has_experts(layer) for layer in range(model.num_layers)]}


ARCHITECTURE = Architecture(
    model_types={"exaone_moe": "ExaoneMoeForCausalLM"},
    behind={"gate": "experts"},
    rows=(
        *decoder((*ATTENTION_NORM, *ATTENTION), routing=(*ROUTER, _BIAS, *SHARED_EXPERTS)),
        *prediction(*DENSE),
    ),
    config=(
        *SIZES,
        heads(num_key_value_heads=32),
        SILU,
        Always("qk_layernorm", True),
        Key("moe.num_experts", "num_experts"),
        Key("moe.topk", "num_experts_per_tok", 8),
        Key("moe.ffn_hidden_size", "moe_intermediate_size"),
        shared_experts("num_shared_experts", 1),
        experts_by_list(dense=1, key="first_k_dense_replace"),
        Rule(("is_moe_layer",), lambda config: {}, _write_experts),
        Only("scoring_func", "sigmoid", "moe.score_function", "sigmoid"),
        Always("moe.expert_bias", True),
        Only("norm_topk_prob", True),
        groups(1, 1),
        Key("moe.topk_scaling_factor", "routed_scaling_factor", 2.5),
        Only("swiglu_limits", None),
        Only("sliding_windows", None),
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(),
        *WINDOWS,
        Rule(("num_nextn_predict_layers",), _read_prediction, _write_prediction),
        tied(False),
    ),
)
