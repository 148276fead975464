"""FlexOlmo (Ai2): OLMo 2 with OLMoE's experts in every layer.

Traps: `post_attention_layernorm` is the norm after attention, and experts read what no norm has; `intermediate_size` is
an expert's.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.moe_keys import INTERMEDIATE_SIZE_OF_EXPERTS, SCORES
from precisionctl.architectures.tables.olmo2 import COMMON

ARCHITECTURE = Architecture(
    model_types={"flex_olmo": "FlexOlmoForCausalLM"},
    rows=llama.model_rows(
        *llama.QKV_LINEAR,
        *llama.QK_NORMS_OVER_HEADS,
        *llama.PROJ,
        *llama.POST_ATTENTION_NORM,
        *moe.ROUTER,
        *moe.EXPERTS,
        *moe.POST_MOE_NORM,
    ),
    config=(
        *(entry for entry in COMMON if "rms_norm_eps" not in entry.keys),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        keys.Key("moe.num_experts", "num_experts", 7, synonym="num_local_experts"),
        keys.Key("moe.topk", "num_experts_per_tok", 5),
        INTERMEDIATE_SIZE_OF_EXPERTS,
        SCORES,
        rope(500000.0),
    ),
    names_by="this project",
)
