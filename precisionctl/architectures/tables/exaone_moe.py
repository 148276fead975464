"""K-EXAONE: EXAONE 4's attention, with norms before and not after it, and DeepSeek-V3's experts.

Traps: the bias that chooses experts is not the router's in published files. Their layer of multi-token prediction,
`mtp.*`, which transformers leaves out, has no experts, whatever the decoder's layers have (vLLM and Megatron-Bridge
build it so).
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, Either, renamed
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.delta_net_rows import DENSE, prediction
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.architectures.tables.exaone4 import WINDOWS

_BIAS = Either(renamed(moe.EXPERT_BIAS, {"mlp.gate.": "mlp."}), in_memory=moe.EXPERT_BIAS)


def _read_prediction(config: keys.Config) -> keys.Fields:
    number = keys.one_or_none(config, "num_nextn_predict_layers")
    return {"mtp_num_layers": number, "mtp_dense": bool(number)}


ARCHITECTURE = Architecture(
    model_types={"exaone_moe": "ExaoneMoeForCausalLM"},
    behind={"gate": "experts"},
    rows=(
        *deepseek_rows.decoder(
            (*llama.ATTENTION_NORM, *llama.ATTENTION), routing=(*moe.WIDE_ROUTER, _BIAS, *moe.SHARED_EXPERTS)
        ),
        *prediction(*DENSE),
    ),
    config=llama_keys(
        keys.always("qk_layernorm", True),
        keys.Key("moe.num_experts", "num_experts"),
        keys.Key("moe.topk", "num_experts_per_tok", 8),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size"),
        deepseek_keys.shared_experts("num_shared_experts", 1),
        deepseek_keys.experts_by_list(dense=1, key="first_k_dense_replace"),
        keys.Rule(  # by which SGLang goes
            ("is_moe_layer",),
            write=lambda model: {"is_moe_layer": [model.has_experts(layer) for layer in range(model.num_layers)]},
        ),
        keys.only("scoring_func", "sigmoid", "moe.score_function", "sigmoid"),
        keys.always("moe.expert_bias", True),
        keys.only("norm_topk_prob", True),
        deepseek_keys.groups(1, 1),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 2.5),
        keys.only("swiglu_limits", None),
        keys.only("sliding_windows", None),
        heads=keys.heads(num_key_value_heads=32),
        epsilon=1e-5,
        after_rotary=(
            *WINDOWS,
            keys.Rule(
                ("num_nextn_predict_layers",),
                _read_prediction,
                lambda model: {"num_nextn_predict_layers": model.mtp_num_layers},
            ),
        ),
    ),
)
