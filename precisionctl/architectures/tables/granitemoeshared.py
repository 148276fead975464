"""Granite-MoE with a shared expert, if `shared_intermediate_size` is not 0.

Trap: gate and up of the shared expert come in one tensor, which is no part of `block_sparse_moe`.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.tables.granite import COMMON
from precisionctl.architectures.tables.granitemoe import EXPERT_KEYS, EXPERTS

SHARED = keys.Rule(
    ("shared_intermediate_size",),
    lambda config: {"moe.shared_ffn_hidden_size": keys.count(config, "shared_intermediate_size") or None},
    lambda model: {"shared_intermediate_size": (model.moe and model.moe.shared_ffn_hidden_size) or 0},
)

ARCHITECTURE = Architecture(
    model_types={"granitemoeshared": "GraniteMoeSharedForCausalLM"},
    rows=llama.model_rows(*llama.ATTENTION_NORM, *llama.ATTENTION, *moe.MOE_NORM, EXPERTS, *moe.JOINED_SHARED_EXPERT),
    config=(*COMMON, *EXPERT_KEYS, SHARED),
)
