"""DeepSeek-V3 and R1, Kimi K2: V2 with sigmoid scores, a bias that only chooses experts, and multi-token prediction.

Traps: a prediction layer's embedding and head are stored copies; transformers neither reads nor writes these layers,
whatever config.json says of them. Rotary channels are neighbouring pairs, in both layouts.
"""

from precisionctl.architectures.config_keys import Key, Only
from precisionctl.architectures.param_map import TIED, Architecture
from precisionctl.architectures.shared.deepseek_keys import COMMON, ROTATED_HEAD, SIGMOID, experts, groups
from precisionctl.architectures.shared.deepseek_rows import ATTENTION, MTP_ALIASES, decoder, prediction

ARCHITECTURE = Architecture(
    model_types={"deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"},
    behind={"gate": "experts"},
    rows=(*decoder(ATTENTION), *prediction(ATTENTION)),
    config=(
        *COMMON,
        *experts(shared=1, dense=3),
        ROTATED_HEAD,
        Key("moe.topk_scaling_factor", "routed_scaling_factor", 2.5),
        Only("rope_interleave", True),
        *SIGMOID,
        Only("norm_topk_prob", True),
        groups(8, 4),
        Key("mtp_num_layers", "num_nextn_predict_layers", 0, synonym="num_mtp_layers"),
    ),
    aliases=(TIED, *MTP_ALIASES),
)
