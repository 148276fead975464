"""A.X K1 (SK Telecom): DeepSeek-V3 with a norm of what routed and shared experts give.

Traps: files call that norm as one of the layer, and have it in dense layers too, where nothing reads it. Released files
have no bias that chooses experts, which transformers then takes for zeros, as `convert` does.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import Always, Key, Only, tied
from precisionctl.architectures.param_map import TIED, Architecture, Condition, Either, Row, only_in, only_with, renamed
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
from precisionctl.architectures.shared.moe_rows import EXPERT_BIAS, POST_MOE_NORM, ROUTER, SHARED_EXPERTS

_NORM = renamed(POST_MOE_NORM, {".post_feedforward_layernorm.": ".post_mlp_layernorm."})
_UNUSED = only_with("stores_unused", only_in("dense", renamed(_NORM, {}, {".mlp.": ".mlp.unused_"})))
_BIAS = tuple(replace(row, present=Condition("hf_expert_bias", ("moe.expert_bias",))) for row in EXPERT_BIAS)
_ROUTING: tuple[Row | Either, ...] = (
    *ROUTER,
    *_BIAS,
    *SHARED_EXPERTS,
    Either(_NORM, renamed(_NORM, {".post_mlp_layernorm.": ".mlp.post_mlp_layernorm."}), second_is="in memory"),
)

ARCHITECTURE = Architecture(
    model_types={"axk1": "AXK1ForCausalLM"},
    # the class has the norm as the last part of the MLP, and files beside it
    behind={"gate": "experts", "post_mlp_layernorm": "mlp"},
    rows=(*decoder(ATTENTION, routing=_ROUTING), *_UNUSED, *prediction(ATTENTION, _ROUTING)),
    config=(
        *latent_attention(1536),
        ROTATED_HEAD,
        *experts_of_a_layer(shared=1),
        experts_by_list(dense=1, key="first_k_dense_replace"),
        Only("moe_layer_freq", 1),
        *SIGMOID,
        Always("moe.post_layernorm", True),
        Only("norm_topk_prob", True),
        groups(8, 4),
        Key("moe.topk_scaling_factor", "routed_scaling_factor", 2.5),
        Only("rope_interleave", True),
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        Key("mtp_num_layers", "num_nextn_predict_layers", 0),
        tied(False),
    ),
    aliases=(TIED, *MTP_ALIASES),
    names_by="this project",
)
