"""Kolibri 1 (Aleph Alpha): experts in every layer, norms before and after attention and experts, a norm of each head's
query and key; a window in four layers of five, and no rotary embeddings in the others.

Traps: the bias that chooses experts is added to their logits, not to the sigmoids that are their weights; these are
divided by no sum unless `norm_topk_prob` is on; `post_attention_layernorm` is the norm before the experts.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import all_but_every
from precisionctl.architectures.param_map import Architecture, Either, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.moe_keys import SCORES
from precisionctl.architectures.tables.exaone4 import windows

_OWN_NAMES = Either(
    (
        *renamed(llama.POST_ATTENTION_NORM, {"post_attention_layernorm": "post_attn_norm"}),
        *renamed(moe.POST_MOE_NORM, {"post_feedforward_layernorm": "post_ffn_norm"}),
        *renamed(moe.EXPERT_BIAS, {"mlp.gate.e_score_correction_bias": "moe.router.expert_bias"}),
    ),
    in_memory=(
        *renamed(llama.POST_ATTENTION_NORM, {"post_attention": "post_self_attn"}),
        *renamed(moe.POST_MOE_NORM, {"post_feedforward": "post_mlp"}),
        *moe.EXPERT_BIAS,
    ),
)

ARCHITECTURE = Architecture(
    model_types={"kolibri1": "Kolibri1ForCausalLM"},
    behind={"gate": "experts"},
    rows=llama.model_rows(
        *llama.ATTENTION_NORM,
        *llama.ATTENTION,
        *moe.MOE_NORM,
        *moe.ROUTER,
        *moe.SHARED_EXPERTS,
        *moe.EXPERTS,
        _OWN_NAMES,
    ),
    config=(
        *keys.SIZES_BESIDE_MLP,
        keys.Key("ffn_hidden_size", "moe_intermediate_size", 512),
        keys.heads(num_key_value_heads=4, head_dim=128),
        keys.SILU,
        keys.only("attention_bias", False),
        keys.always("qk_layernorm", True),
        keys.always("post_layernorms", True),
        keys.EVERY_LAYER_SPARSE,
        keys.Key("moe.num_experts", "num_experts", 384, synonym="num_local_experts"),
        keys.Key("moe.topk", "num_experts_per_tok", 6),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size", 512),
        keys.Key("moe.shared_ffn_hidden_size", "shared_expert_intermediate_size", 512),
        keys.always("moe.score_function", "sigmoid"),
        keys.always("moe.expert_bias", True),
        keys.always("moe.expert_bias_on_logits", True),
        SCORES,
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        *windows(all_but_every(5), absent=513),
        keys.tied(False),
    ),
    names_by="this project",
)
