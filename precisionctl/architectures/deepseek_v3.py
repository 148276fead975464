"""DeepSeek-V3 and R1, Kimi K2: V2 with sigmoid scores, a bias that only chooses experts, and multi-token prediction.

Traps: a prediction layer's embedding and head are stored copies; transformers neither reads nor writes these layers,
whatever config.json says of them. Rotary channels are neighbouring pairs, in both layouts.
"""

from precisionctl.architectures.config_keys import Always, Config, Fields, Key, Only, Rule
from precisionctl.architectures.deepseek_keys import COMMON
from precisionctl.architectures.deepseek_rows import DECODER, MTP, MTP_ALIASES
from precisionctl.architectures.llama_rows import ROTARY, TIED
from precisionctl.architectures.param_map import Architecture
from precisionctl.model_shape import ModelShape


def _read_groups(config: Config, where: object) -> Fields:
    groups = config.get("n_group", 8)
    if groups in (None, 1):
        return {}
    return {"moe.num_groups": groups, "moe.group_topk": config.get("topk_group", 4), "moe.group_scores": 2}


def _write_groups(model: ModelShape) -> Config:
    groups = (model.moe.num_groups, model.moe.group_topk) if model.moe else (None, None)
    return {"n_group": groups[0] or 1, "topk_group": groups[1] or 1}


ARCHITECTURE = Architecture(
    model_types={"deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"},
    rows=(*DECODER, *MTP),
    config=(
        *COMMON,
        Key("moe.topk_scaling_factor", "routed_scaling_factor", 2.5),
        Only("scoring_func", "sigmoid"),
        Only("topk_method", "noaux_tc"),
        Only("norm_topk_prob", True),
        Only("rope_interleave", True),
        Always("moe.score_function", "sigmoid"),
        Always("moe.expert_bias", True),
        Rule(("n_group", "topk_group"), _read_groups, _write_groups),
        Key("mtp_num_layers", "num_nextn_predict_layers", 0),
    ),
    aliases=(TIED, *MTP_ALIASES),
    derived=ROTARY,
)
