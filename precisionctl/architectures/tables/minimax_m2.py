"""MiniMax-M2: experts in every layer, chosen as DeepSeek-V3's without groups; queries and keys are normalised over all
heads.

Traps: `intermediate_size` is an expert's; released files say by `rotary_dim` how many channels of a head are rotated.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, Either, renamed
from precisionctl.architectures.rope import rope_with_dim
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.architectures.shared.moe_keys import INTERMEDIATE_SIZE_OF_EXPERTS, JITTER
from precisionctl.architectures.tables.mixtral import EXPERTS as MIXTRAL_EXPERTS
from precisionctl.architectures.tables.olmo2 import NORM_OVER_HEADS

_HEAD_DIM = 128
"""What its class takes where none is said."""

_BIAS = "mlp.gate.e_score_correction_bias"

ARCHITECTURE = Architecture(
    model_types={"minimax_m2": "MiniMaxM2ForCausalLM"},
    rows=llama.model_rows(
        *llama.ATTENTION_NORM,
        *llama.QKV_LINEAR,
        *llama.QK_NORMS_OVER_HEADS,
        *llama.PROJ,
        *moe.MOE_NORM,
        Either(
            (*renamed(moe.EXPERT_BIAS, {_BIAS: "block_sparse_moe.e_score_correction_bias"}), *MIXTRAL_EXPERTS.first),
            in_memory=(*renamed(moe.EXPERT_BIAS, {_BIAS: "mlp.e_score_correction_bias"}), *MIXTRAL_EXPERTS.in_memory),
        ),
    ),
    config=llama_keys(
        *NORM_OVER_HEADS,
        keys.only("use_qk_norm", True),
        keys.only("qk_norm_type", "per_layer"),
        keys.Key("moe.num_experts", "num_local_experts", 256, synonym="num_experts"),
        keys.Key("moe.topk", "num_experts_per_tok", 8),
        INTERMEDIATE_SIZE_OF_EXPERTS,
        JITTER,
        keys.only("scoring_func", "sigmoid"),
        keys.only("use_routing_bias", True),
        keys.only("shared_intermediate_size", 0),
        keys.always("moe.score_function", "sigmoid"),
        keys.always("moe.expert_bias", True),
        heads=keys.heads(num_key_value_heads=8, head_dim=_HEAD_DIM),
        rotary=rope_with_dim(_HEAD_DIM, heeds_dim=True),
    ),
    names_by="Megatron-Bridge",
)
