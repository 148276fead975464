"""OLMoE: experts in every layer; queries and keys are normalised over all heads.

Trap: `intermediate_size` is an expert's.
"""

from precisionctl.architectures.config_keys import ATTENTION_BIAS, HEADS, SILU, SIZES, Key, Only, tied
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION_NORM,
    PROJ,
    QK_NORMS_OVER_HEADS,
    QKV_LINEAR,
    model_rows,
)
from precisionctl.architectures.shared.moe_rows import EXPERTS, MOE_NORM, ROUTER
from precisionctl.architectures.tables.mixtral import EXPERTS_EVERYWHERE
from precisionctl.architectures.tables.olmo2 import NORM_OVER_HEADS
from precisionctl.architectures.tables.qwen3_moe import SCORES

ARCHITECTURE = Architecture(
    model_types={"olmoe": "OlmoeForCausalLM"},
    rows=model_rows(*ATTENTION_NORM, *QKV_LINEAR, *QK_NORMS_OVER_HEADS, *PROJ, *MOE_NORM, *ROUTER, *EXPERTS),
    config=(
        *SIZES,
        HEADS,
        ATTENTION_BIAS,
        SILU,
        *NORM_OVER_HEADS,
        Only("clip_qkv", None),
        Key("moe.num_experts", "num_experts", 64, synonym="num_local_experts"),
        Key("moe.topk", "num_experts_per_tok", 8),
        EXPERTS_EVERYWHERE,
        SCORES,
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(),
        tied(False),
    ),
    names_by="Megatron-Bridge",
)
