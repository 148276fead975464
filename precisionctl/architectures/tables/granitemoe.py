"""Granite-MoE: Granite with experts in every layer, fused in two tensors of three dimensions.

Trap: `input_linear` is gate, then up, of each expert.
"""

from precisionctl.architectures.config_keys import Entry, Key
from precisionctl.architectures.param_map import Architecture, Either, renamed
from precisionctl.architectures.shared.llama_rows import ATTENTION, ATTENTION_NORM, model_rows
from precisionctl.architectures.shared.moe_rows import FUSED, MOE_NORM, ROUTER
from precisionctl.architectures.tables.granite import COMMON
from precisionctl.architectures.tables.mixtral import EXPERTS_EVERYWHERE

_NAMES = {
    "mlp.gate.weight": "block_sparse_moe.router.layer.weight",
    "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
}
_NAMES_IN_MEMORY = {"mlp.gate.weight": "block_sparse_moe.router.weight", "mlp.experts": "block_sparse_moe.experts"}

IN_MEMORY = renamed((*ROUTER, *FUSED), _NAMES_IN_MEMORY)
EXPERTS = Either(renamed((*ROUTER, *FUSED), _NAMES), IN_MEMORY, second_is="in memory")

EXPERT_KEYS: tuple[Entry, ...] = (
    Key("moe.num_experts", "num_local_experts", 8),
    Key("moe.topk", "num_experts_per_tok", 2),
    EXPERTS_EVERYWHERE,
)

ARCHITECTURE = Architecture(
    model_types={"granitemoe": "GraniteMoeForCausalLM"},
    rows=model_rows(*ATTENTION_NORM, *ATTENTION, *MOE_NORM, EXPERTS),
    config=(*COMMON, *EXPERT_KEYS),
)
