"""Kolibri 1 (Aleph Alpha): experts in every layer, norms before and after attention and experts, a norm of each head's
query and key; a window in four layers of five, and no rotary embeddings in the others.

Traps: the bias that chooses experts is added to their logits, not to the sigmoids that are their weights; these are
divided by no sum unless `norm_topk_prob` is on; `post_attention_layernorm` is the norm before the experts.
"""

from precisionctl.architectures.config_keys import (
    EVERY_LAYER_SPARSE,
    SILU,
    SIZES_BESIDE_MLP,
    Always,
    Key,
    Only,
    heads,
    tied,
)
from precisionctl.architectures.config_layers import all_but_every
from precisionctl.architectures.param_map import Architecture, Either, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.gemma_rows import POST_ATTENTION_NORM
from precisionctl.architectures.shared.llama_rows import ATTENTION, ATTENTION_NORM, model_rows
from precisionctl.architectures.shared.moe_rows import (
    EXPERT_BIAS,
    EXPERTS,
    MOE_NORM,
    POST_MOE_NORM,
    ROUTER,
    SHARED_EXPERTS,
)
from precisionctl.architectures.tables.exaone4 import windows
from precisionctl.architectures.tables.qwen3_moe import SCORES

_OWN_NAMES = Either(
    (
        *renamed(POST_ATTENTION_NORM, {"post_attention_layernorm": "post_attn_norm"}),
        *renamed(POST_MOE_NORM, {"post_feedforward_layernorm": "post_ffn_norm"}),
        *renamed(EXPERT_BIAS, {"mlp.gate.e_score_correction_bias": "moe.router.expert_bias"}),
    ),
    (
        *renamed(POST_ATTENTION_NORM, {"post_attention": "post_self_attn"}),
        *renamed(POST_MOE_NORM, {"post_feedforward": "post_mlp"}),
        *EXPERT_BIAS,
    ),
    second_is="in memory",
)

ARCHITECTURE = Architecture(
    model_types={"kolibri1": "Kolibri1ForCausalLM"},
    behind={"gate": "experts"},
    rows=model_rows(*ATTENTION_NORM, *ATTENTION, *MOE_NORM, *ROUTER, *SHARED_EXPERTS, *EXPERTS, _OWN_NAMES),
    config=(
        *SIZES_BESIDE_MLP,
        Key("ffn_hidden_size", "moe_intermediate_size", 512),
        heads(num_key_value_heads=4, head_dim=128),
        SILU,
        Only("attention_bias", False),
        Always("qk_layernorm", True),
        Always("post_layernorms", True),
        EVERY_LAYER_SPARSE,
        Key("moe.num_experts", "num_experts", 384, synonym="num_local_experts"),
        Key("moe.topk", "num_experts_per_tok", 6),
        Key("moe.ffn_hidden_size", "moe_intermediate_size", 512),
        Key("moe.shared_ffn_hidden_size", "shared_expert_intermediate_size", 512),
        Always("moe.score_function", "sigmoid"),
        Always("moe.expert_bias", True),
        Always("moe.expert_bias_on_logits", True),
        SCORES,
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        *windows(all_but_every(5), absent=513),
        tied(False),
    ),
    names_by="this project",
)
