"""LFM2 with experts in all layers but the first ones, chosen as DeepSeek-V3's without groups.

Traps: what is added to scores is no part of the router, but stands beside it. transformers divides scores by their sum
and 1e-6, Megatron-Core by their sum.
"""

from precisionctl.architectures.config_keys import Config, Fields, Key, Only, Rule
from precisionctl.architectures.config_layers import listed_layers
from precisionctl.architectures.param_map import ROTARY, Architecture, Either, renamed
from precisionctl.architectures.shared.deepseek_keys import leading_dense
from precisionctl.architectures.shared.moe_rows import EXPERT_BIAS, FUSED, MOE_NORM, ROUTER, experts
from precisionctl.architectures.tables.lfm2 import COMMON, KINDS, NAMES, rows, write_layers
from precisionctl.errors import DamagedCheckpoint

_BLOCK = {".mlp.gate.e_score_correction_bias": ".feed_forward.expert_bias", ".mlp.": ".feed_forward."}
_NUMBERED = experts(
    *(f"model.layers.{{layer}}.feed_forward.experts.{{expert}}.{name}.weight" for name in ("w1", "w3", "w2"))
)


def _read_layers(config: Config) -> Fields:
    listed = listed_layers(config, KINDS)
    if listed is None:
        raise DamagedCheckpoint("no `layer_types`, which its class has no default for")
    return {"short_conv.layers": tuple(listed)}


ARCHITECTURE = Architecture(
    model_types={"lfm2_moe": "Lfm2MoeForCausalLM"},
    rows=rows(
        *renamed(MOE_NORM, NAMES),
        *renamed((*ROUTER, *EXPERT_BIAS), _BLOCK),
        Either(_NUMBERED, renamed(FUSED, _BLOCK), second_is="in memory"),
    ),
    config=(
        *COMMON,
        Key("hidden_size", "hidden_size", 2048),
        Key("ffn_hidden_size", "intermediate_size", 7168),
        Rule(("layer_types",), _read_layers, write_layers),
        leading_dense("num_dense_layers", 2),
        Key("moe.num_experts", "num_experts", 32),
        Key("moe.topk", "num_experts_per_tok", 4),
        Key("moe.ffn_hidden_size", "moe_intermediate_size", 1792),
        Key("moe.expert_bias", "use_expert_bias", True),
        Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.0),
        Only("norm_topk_prob", True, "moe.score_function", "sigmoid"),
    ),
    derived=(*ROTARY, "model.pos_emb.inv_freq"),
    names_by="this project",
)
