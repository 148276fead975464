"""Granite-MoE with a shared expert, if `shared_intermediate_size` is not 0.

Trap: gate and up of the shared expert come in one tensor, which is no part of `block_sparse_moe`.
"""

from precisionctl.architectures.config_keys import Config, Fields, Rule
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared.llama_rows import ATTENTION, ATTENTION_NORM, model_rows
from precisionctl.architectures.shared.moe_rows import JOINED_SHARED_EXPERT, MOE_NORM
from precisionctl.architectures.tables.granite import COMMON
from precisionctl.architectures.tables.granitemoe import EXPERT_KEYS, EXPERTS


def _read_shared(config: Config) -> Fields:
    shared = config.get("shared_intermediate_size")
    return {"moe.shared_ffn_hidden_size": None if shared == 0 else shared}


SHARED = Rule(
    ("shared_intermediate_size",),
    _read_shared,
    lambda model: {"shared_intermediate_size": (model.moe and model.moe.shared_ffn_hidden_size) or 0},
)

ARCHITECTURE = Architecture(
    model_types={"granitemoeshared": "GraniteMoeSharedForCausalLM"},
    rows=model_rows(*ATTENTION_NORM, *ATTENTION, *MOE_NORM, EXPERTS, *JOINED_SHARED_EXPERT),
    config=(*COMMON, *EXPERT_KEYS, SHARED),
)
