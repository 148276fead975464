"""DeepSeek-V3 and R1, Kimi K2: V2 with sigmoid scores, a bias that only chooses experts, and multi-token prediction.

Traps: a prediction layer's embedding and head are stored copies; transformers neither reads nor writes these layers,
whatever config.json says of them. Rotary channels are neighbouring pairs, in both layouts.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import TIED, Architecture
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows

ARCHITECTURE = Architecture(
    model_types={"deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"},
    behind={"gate": "experts"},
    rows=(*deepseek_rows.decoder(deepseek_rows.ATTENTION), *deepseek_rows.prediction(deepseek_rows.ATTENTION)),
    config=(
        *deepseek_keys.COMMON,
        *deepseek_keys.experts(shared=1, dense=3),
        deepseek_keys.ROTATED_HEAD,
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 2.5),
        keys.only("rope_interleave", True),
        *deepseek_keys.router(8, 4),
        keys.Key("mtp_num_layers", "num_nextn_predict_layers", 0, synonym="num_mtp_layers"),
    ),
    aliases=(TIED, *deepseek_rows.MTP_ALIASES),
)
