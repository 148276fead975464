"""Qwen3-Next: in three of four layers a gated delta net in the place of attention, and experts in all of them.

Traps: published files have a layer of multi-token prediction, `mtp.*`, of which config.json says nothing and which
transformers leaves out. q_proj makes an output gate too, head by head. Without `partial_rotary_factor` a quarter of
each head's channels is rotated.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rearrangements import BY_HEAD
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.shared.delta_net_keys import COMMON, prediction_layers
from precisionctl.architectures.shared.delta_net_rows import DENSE, SPARSE, delta_net, prediction
from precisionctl.architectures.shared.moe_keys import EXPERTS_OF_LAYERS, scores

ARCHITECTURE = Architecture(
    model_types={"qwen3_next": "Qwen3NextForCausalLM"},
    rows=(
        *llama.model_rows(*delta_net(BY_HEAD, "in_proj_qkvz", "in_proj_ba", values=("in_proj_ba",)), *DENSE, *SPARSE),
        *prediction(*DENSE, *SPARSE),
    ),
    config=(
        *keys.SIZES,
        *COMMON,
        keys.heads(num_key_value_heads=2, head_dim=256),
        *EXPERTS_OF_LAYERS,
        keys.Key("moe.shared_ffn_hidden_size", "shared_expert_intermediate_size", 512),
        keys.always("moe.shared_expert_gate", True),
        scores(True),
        prediction_layers("num_nextn_predict_layers"),
    ),
)
