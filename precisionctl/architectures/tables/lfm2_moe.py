"""LFM2 with experts in all layers but the first ones, chosen as DeepSeek-V3's without groups.

Traps: what is added to scores is no part of the router, but stands beside it. transformers divides scores by their sum
and 1e-6, Megatron-Core by their sum.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import listed_layers, write_layer_types
from precisionctl.architectures.param_map import ROTARY, Architecture, Either, renamed
from precisionctl.architectures.shared import deepseek_keys, moe_rows as moe
from precisionctl.architectures.tables.lfm2 import COMMON, KINDS, NAMES, rows
from precisionctl.errors import DamagedCheckpoint

_BLOCK = {".mlp.gate.e_score_correction_bias": ".feed_forward.expert_bias", ".mlp.": ".feed_forward."}
_NUMBERED = moe.experts("model.layers.{layer}.feed_forward.experts")


def _read_layers(config: keys.Config) -> keys.Fields:
    listed = listed_layers(config, KINDS)
    if listed is None:
        raise DamagedCheckpoint("no `layer_types`, which its class has no default for")
    return {"short_conv.layers": tuple(listed)}


ARCHITECTURE = Architecture(
    model_types={"lfm2_moe": "Lfm2MoeForCausalLM"},
    rows=rows(
        *renamed(moe.MOE_NORM, NAMES),
        *renamed((*moe.ROUTER, *moe.EXPERT_BIAS), _BLOCK),
        Either(_NUMBERED, in_memory=renamed(moe.FUSED, _BLOCK)),
    ),
    config=(
        *COMMON,
        keys.Key("hidden_size", "hidden_size", 2048),
        keys.Key("ffn_hidden_size", "intermediate_size", 7168),
        keys.Rule(("layer_types",), _read_layers, write_layer_types),
        deepseek_keys.leading_dense("num_dense_layers", 2),
        keys.Key("moe.num_experts", "num_experts", 32),
        keys.Key("moe.topk", "num_experts_per_tok", 4),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size", 1792),
        keys.Key("moe.expert_bias", "use_expert_bias", True),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.0),
        keys.only("norm_topk_prob", True, "moe.score_function", "sigmoid"),
    ),
    derived=(*ROTARY, "model.pos_emb.inv_freq"),
    names_by="this project",
)
