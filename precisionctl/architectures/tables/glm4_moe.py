"""GLM-4.5 and 4.6: Llama's attention before DeepSeek-V3's experts.

Traps: half of each head's channels are rotated; `attention_bias` is of q, k and v alone.
"""

from precisionctl.architectures.config_keys import SILU, SIZES, Key, Only, heads, tied
from precisionctl.architectures.param_map import TIED, Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.deepseek_keys import SIGMOID, experts, groups
from precisionctl.architectures.shared.deepseek_rows import MTP_ALIASES, decoder, prediction
from precisionctl.architectures.shared.llama_rows import ATTENTION, ATTENTION_NORM

_ATTENTION = (*ATTENTION_NORM, *ATTENTION)

ARCHITECTURE = Architecture(
    model_types={"glm4_moe": "Glm4MoeForCausalLM"},
    behind={"gate": "experts"},
    rows=(*decoder(_ATTENTION), *prediction(_ATTENTION)),
    config=(
        *SIZES,
        heads(num_key_value_heads=8),
        SILU,
        Key("qkv_bias", "attention_bias", False),
        Key("qk_layernorm", "use_qk_norm", False),
        *experts(shared=1, dense=1),
        *SIGMOID,
        Only("norm_topk_prob", True),
        groups(1, 1),
        Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.0),
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(percent=0.5, partial=True),
        Key("mtp_num_layers", "num_nextn_predict_layers", 0, synonym="num_mtp_layers"),
        tied(False),
    ),
    aliases=(TIED, *MTP_ALIASES),
)
