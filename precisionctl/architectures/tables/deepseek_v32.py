"""DeepSeek-V3.2: V3 with an indexer in every layer, which chooses the keys that a query sees.

Traps: the indexer's heads have their rotary channels first, as halves, where attention has neighbouring pairs; its norm
is a LayerNorm of epsilon 1e-6, stored in FP32.
"""

from precisionctl.architectures.config_keys import Config, Entry, Fields, Key, Only, Rule, layers, tied
from precisionctl.architectures.param_map import TIED, Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.deepseek_keys import (
    INDEXER,
    SIGMOID,
    experts_by_list,
    experts_of_a_layer,
    groups,
    latent_attention,
)
from precisionctl.architectures.shared.deepseek_rows import INDEXED_ATTENTION, MTP_ALIASES, decoder, prediction

ROWS = (*decoder(INDEXED_ATTENTION), *prediction(INDEXED_ATTENTION))

COMMON: tuple[Entry, ...] = (
    *experts_of_a_layer(shared=1),
    experts_by_list(dense=3, key="first_k_dense_replace"),
    Only("moe_layer_freq", 1),
    *SIGMOID,
    Only("norm_topk_prob", True),
    Key("moe.topk_scaling_factor", "routed_scaling_factor", 2.5),
    *INDEXER,
    rope(),
    Key("mtp_num_layers", "num_nextn_predict_layers", 0),
    tied(False),
)
"""Keys that GLM-5 has too."""


def _everywhere(config: Config) -> Fields:
    return {"dsa.layers": (True,) * layers(config)}


ARCHITECTURE = Architecture(
    model_types={"deepseek_v32": "DeepseekV32ForCausalLM"},
    behind={"gate": "experts"},
    rows=ROWS,
    config=(
        *latent_attention(1536),
        *COMMON,
        Key("dsa.n_heads", "index_n_heads", 64),
        Rule((), _everywhere),
        groups(8, 4),
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
    ),
    aliases=(TIED, *MTP_ALIASES),
)
