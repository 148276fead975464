"""GLM-4.5 and 4.6: Llama's attention before DeepSeek-V3's experts.

Traps: half of each head's channels are rotated; `attention_bias` is of q, k and v alone.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import TIED, Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama
from precisionctl.architectures.shared.llama_keys import llama_keys

_ATTENTION = (*llama.ATTENTION_NORM, *llama.ATTENTION)

ARCHITECTURE = Architecture(
    model_types={"glm4_moe": "Glm4MoeForCausalLM"},
    behind={"gate": "experts"},
    rows=(*deepseek_rows.decoder(_ATTENTION), *deepseek_rows.prediction(_ATTENTION)),
    config=llama_keys(
        keys.Key("qkv_bias", "attention_bias", False),
        keys.Key("qk_layernorm", "use_qk_norm", False),
        *deepseek_keys.experts(shared=1, dense=1),
        *deepseek_keys.router(1, 1),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.0),
        heads=keys.heads(num_key_value_heads=8),
        epsilon=1e-5,
        rotary=rope(percent=0.5, partial=True),
        after_rotary=(keys.Key("mtp_num_layers", "num_nextn_predict_layers", 0, synonym="num_mtp_layers"),),
    ),
    aliases=(TIED, *deepseek_rows.MTP_ALIASES),
)
