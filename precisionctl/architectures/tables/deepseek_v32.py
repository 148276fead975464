"""DeepSeek-V3.2: V3 with an indexer in every layer, which chooses the keys that a query sees.

Traps: the indexer's heads have their rotary channels first, as halves, where attention has neighbouring pairs; its norm
is a LayerNorm of epsilon 1e-6, stored in FP32.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import TIED, Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows

ROWS = (
    *deepseek_rows.decoder(deepseek_rows.INDEXED_ATTENTION),
    *deepseek_rows.prediction(deepseek_rows.INDEXED_ATTENTION),
)

COMMON: tuple[keys.Entry, ...] = (
    *deepseek_keys.experts_of_a_layer(shared=1),
    deepseek_keys.experts_by_list(dense=3, key="first_k_dense_replace"),
    keys.only("moe_layer_freq", 1),
    *deepseek_keys.SIGMOID,
    keys.only("norm_topk_prob", True),
    keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 2.5),
    *deepseek_keys.INDEXER,
    rope(),
    keys.Key("mtp_num_layers", "num_nextn_predict_layers", 0),
    keys.tied(False),
)
"""Keys that GLM-5 has too."""

ARCHITECTURE = Architecture(
    model_types={"deepseek_v32": "DeepseekV32ForCausalLM"},
    behind={"gate": "experts"},
    rows=ROWS,
    config=(
        *deepseek_keys.latent_attention(1536),
        *COMMON,
        keys.Key("dsa.n_heads", "index_n_heads", 64),
        keys.in_all_layers("dsa.layers", True),
        deepseek_keys.groups(8, 4),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
    ),
    aliases=(TIED, *deepseek_rows.MTP_ALIASES),
)
