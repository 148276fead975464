"""Granite-MoE: Granite with experts in every layer, fused in two tensors of three dimensions.

Trap: `input_linear` is gate, then up, of each expert.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, Either, renamed
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.moe_keys import INTERMEDIATE_SIZE_OF_EXPERTS
from precisionctl.architectures.tables.granite import COMMON

_NAMES = {
    "mlp.gate.weight": "block_sparse_moe.router.layer.weight",
    "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
}
_NAMES_IN_MEMORY = {"mlp.gate.weight": "block_sparse_moe.router.weight", "mlp.experts": "block_sparse_moe.experts"}

IN_MEMORY = renamed((*moe.ROUTER, *moe.FUSED), _NAMES_IN_MEMORY)
EXPERTS = Either(renamed((*moe.ROUTER, *moe.FUSED), _NAMES), in_memory=IN_MEMORY)

EXPERT_KEYS: tuple[keys.Entry, ...] = (
    keys.Key("moe.num_experts", "num_local_experts", 8),
    keys.Key("moe.topk", "num_experts_per_tok", 2),
    INTERMEDIATE_SIZE_OF_EXPERTS,
)

ARCHITECTURE = Architecture(
    model_types={"granitemoe": "GraniteMoeForCausalLM"},
    rows=llama.model_rows(*llama.ATTENTION_NORM, *llama.ATTENTION, *moe.MOE_NORM, EXPERTS),
    config=(*COMMON, *EXPERT_KEYS),
)
