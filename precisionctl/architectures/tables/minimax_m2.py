"""MiniMax-M2: experts in every layer, chosen as DeepSeek-V3's without groups; queries and keys are normalised over all
heads.

Traps: `intermediate_size` is an expert's; released files say by `rotary_dim` how many channels of a head are rotated.
"""

from precisionctl.architectures.config_keys import (
    SILU,
    SIZES,
    Always,
    Key,
    Only,
    heads,
    tied,
)
from precisionctl.architectures.param_map import Architecture, Either, renamed
from precisionctl.architectures.rope import rope_with_dim
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION_NORM,
    PROJ,
    QK_NORMS_OVER_HEADS,
    QKV_LINEAR,
    model_rows,
)
from precisionctl.architectures.shared.moe_rows import EXPERT_BIAS, MOE_NORM
from precisionctl.architectures.tables.mixtral import EXPERTS as MIXTRAL_EXPERTS
from precisionctl.architectures.tables.mixtral import EXPERTS_EVERYWHERE
from precisionctl.architectures.tables.olmo2 import NORM_OVER_HEADS

_HEAD_DIM = 128
"""What its class takes where none is said."""

_BIAS = "mlp.gate.e_score_correction_bias"

ARCHITECTURE = Architecture(
    model_types={"minimax_m2": "MiniMaxM2ForCausalLM"},
    rows=model_rows(
        *ATTENTION_NORM,
        *QKV_LINEAR,
        *QK_NORMS_OVER_HEADS,
        *PROJ,
        *MOE_NORM,
        Either(
            (*renamed(EXPERT_BIAS, {_BIAS: "block_sparse_moe.e_score_correction_bias"}), *MIXTRAL_EXPERTS.first),
            (*renamed(EXPERT_BIAS, {_BIAS: "mlp.e_score_correction_bias"}), *MIXTRAL_EXPERTS.second),
            second_is="in memory",
        ),
    ),
    config=(
        *SIZES,
        heads(num_key_value_heads=8, head_dim=_HEAD_DIM),
        SILU,
        *NORM_OVER_HEADS,
        Only("use_qk_norm", True),
        Only("qk_norm_type", "per_layer"),
        Key("moe.num_experts", "num_local_experts", 256, synonym="num_experts"),
        Key("moe.topk", "num_experts_per_tok", 8),
        EXPERTS_EVERYWHERE,
        Only("scoring_func", "sigmoid"),
        Only("use_routing_bias", True),
        Only("shared_intermediate_size", 0),
        Always("moe.score_function", "sigmoid"),
        Always("moe.expert_bias", True),
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope_with_dim(5000000.0, _HEAD_DIM, heeds_dim=True),
        tied(False),
    ),
    names_by="Megatron-Bridge",
)
