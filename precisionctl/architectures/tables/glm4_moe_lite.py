"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts.

Trap: a list says which layers have experts. Engines go by `first_k_dense_replace`, which transformers passes over.
"""

from precisionctl.architectures.config_keys import Key, Only, tied
from precisionctl.architectures.param_map import TIED, Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.deepseek_keys import (
    ROTATED_HEAD,
    SIGMOID,
    experts_by_list,
    experts_of_a_layer,
    groups,
    latent_attention,
)
from precisionctl.architectures.shared.deepseek_rows import ATTENTION, MTP_ALIASES, decoder, prediction

ARCHITECTURE = Architecture(
    model_types={"glm4_moe_lite": "Glm4MoeLiteForCausalLM"},
    behind={"gate": "experts"},
    rows=(*decoder(ATTENTION), *prediction(ATTENTION)),
    config=(
        *latent_attention(768),
        ROTATED_HEAD,
        *experts_of_a_layer(shared=1),
        experts_by_list(dense=1, key="first_k_dense_replace", reads_key=False),
        *SIGMOID,
        Only("norm_topk_prob", True),
        groups(1, 1),
        Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.8),
        Only("rope_interleave", True),
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(),
        Key("mtp_num_layers", "num_nextn_predict_layers", 0),
        tied(False),
    ),
    aliases=(TIED, *MTP_ALIASES),
)
