"""OLMoE: experts in every layer; queries and keys are normalised over all heads.

Trap: `intermediate_size` is an expert's.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.architectures.shared.moe_keys import INTERMEDIATE_SIZE_OF_EXPERTS, SCORES
from precisionctl.architectures.tables.olmo2 import NORM_OVER_HEADS

ARCHITECTURE = Architecture(
    model_types={"olmoe": "OlmoeForCausalLM"},
    rows=llama.model_rows(
        *llama.ATTENTION_NORM,
        *llama.QKV_LINEAR,
        *llama.QK_NORMS_OVER_HEADS,
        *llama.PROJ,
        *moe.MOE_NORM,
        *moe.ROUTER,
        *moe.EXPERTS,
    ),
    config=llama_keys(
        *NORM_OVER_HEADS,
        keys.only("clip_qkv", None),
        keys.Key("moe.num_experts", "num_experts", 64, synonym="num_local_experts"),
        keys.Key("moe.topk", "num_experts_per_tok", 8),
        INTERMEDIATE_SIZE_OF_EXPERTS,
        SCORES,
        attention_bias=True,
        epsilon=1e-5,
    ),
    names_by="Megatron-Bridge",
)
