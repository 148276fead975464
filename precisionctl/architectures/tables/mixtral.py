"""Mixtral: Mistral with experts in every layer.

Trap: w1 is the gate, w3 the up projection and w2 the down projection.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import everywhere, sliding_window
from precisionctl.architectures.param_map import Architecture, Either, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.architectures.shared.moe_keys import INTERMEDIATE_SIZE_OF_EXPERTS, JITTER

EXPERTS = Either(
    (
        *renamed(moe.ROUTER, {"mlp.gate": "block_sparse_moe.gate"}),
        *moe.experts("model.layers.{layer}.block_sparse_moe.experts"),
    ),
    in_memory=(*moe.ROUTER, *moe.FUSED),
)

ARCHITECTURE = Architecture(
    model_types={"mixtral": "MixtralForCausalLM"},
    rows=llama.model_rows(*llama.ATTENTION_NORM, *llama.ATTENTION, *moe.MOE_NORM, EXPERTS),
    config=llama_keys(
        keys.Key("moe.num_experts", "num_local_experts", 8, synonym="num_experts"),
        keys.Key("moe.topk", "num_experts_per_tok", 2),
        INTERMEDIATE_SIZE_OF_EXPERTS,
        JITTER,
        heads=keys.heads(num_key_value_heads=8),
        epsilon=1e-5,
        rotary=rope(1e6),
        after_rotary=(sliding_window(everywhere, listed=False),),
    ),
)
