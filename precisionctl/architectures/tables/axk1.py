"""A.X K1 (SK Telecom): DeepSeek-V3 with a norm of what routed and shared experts give.

Traps: files call that norm as one of the layer, and have it in dense layers too, where nothing reads it. Released files
have no bias that chooses experts, which transformers then takes for zeros, as `convert` does.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import TIED, Architecture, Condition, Either, Row, only_in, only_with, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, moe_rows as moe

_NORM = renamed(moe.POST_MOE_NORM, {".post_feedforward_layernorm.": ".post_mlp_layernorm."})
_UNUSED = only_with("stores_unused", only_in("dense", renamed(_NORM, {}, {".mlp.": ".mlp.unused_"})))
_BIAS = tuple(replace(row, present=Condition("hf_expert_bias", ("moe.expert_bias",))) for row in moe.EXPERT_BIAS)
_ROUTING: tuple[Row | Either, ...] = (
    *moe.WIDE_ROUTER,
    *_BIAS,
    *moe.SHARED_EXPERTS,
    Either(_NORM, in_memory=renamed(_NORM, {".post_mlp_layernorm.": ".mlp.post_mlp_layernorm."})),
)

ARCHITECTURE = Architecture(
    model_types={"axk1": "AXK1ForCausalLM"},
    # the class has the norm as the last part of the MLP, and files beside it
    behind={"gate": "experts", "post_mlp_layernorm": "mlp"},
    rows=(
        *deepseek_rows.decoder(deepseek_rows.ATTENTION, routing=_ROUTING),
        *_UNUSED,
        *deepseek_rows.prediction(deepseek_rows.ATTENTION, _ROUTING),
    ),
    config=(
        *deepseek_keys.latent_attention(1536),
        deepseek_keys.ROTATED_HEAD,
        *deepseek_keys.experts_of_a_layer(shared=1),
        deepseek_keys.experts_by_list(dense=1, key="first_k_dense_replace"),
        keys.only("moe_layer_freq", 1),
        *deepseek_keys.router(8, 4),
        keys.always("moe.post_layernorm", True),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 2.5),
        keys.only("rope_interleave", True),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        keys.Key("mtp_num_layers", "num_nextn_predict_layers", 0),
        keys.tied(False),
    ),
    aliases=(TIED, *deepseek_rows.MTP_ALIASES),
    names_by="this project",
)
