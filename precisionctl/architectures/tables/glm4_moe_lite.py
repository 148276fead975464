"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts.

Trap: a list says which layers have experts. Engines go by `first_k_dense_replace`, which transformers passes over.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import TIED, Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows

ARCHITECTURE = Architecture(
    model_types={"glm4_moe_lite": "Glm4MoeLiteForCausalLM"},
    behind={"gate": "experts"},
    rows=(*deepseek_rows.decoder(deepseek_rows.ATTENTION), *deepseek_rows.prediction(deepseek_rows.ATTENTION)),
    config=(
        *deepseek_keys.latent_attention(768),
        deepseek_keys.ROTATED_HEAD,
        *deepseek_keys.experts_of_a_layer(shared=1),
        deepseek_keys.experts_by_list(dense=1, key="first_k_dense_replace", reads_key=False),
        *deepseek_keys.router(1, 1),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.8),
        keys.only("rope_interleave", True),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(),
        keys.Key("mtp_num_layers", "num_nextn_predict_layers", 0),
        keys.tied(False),
    ),
    aliases=(TIED, *deepseek_rows.MTP_ALIASES),
)
