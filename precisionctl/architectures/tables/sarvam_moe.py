"""Sarvam 30B: GLM-4.5's experts behind attention whose heads turn whole, under Ling's names.

Traps: queries, keys and values are one tensor, all of each after the other, in published files and in what transformers
saves, and three in its memory. Published files have other words than transformers for three keys of config.json, and
say more, which engines ask for and its class does not write.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import (
    SILU,
    SIZES,
    TWO_CLASSES,
    Entry,
    Key,
    Only,
    Reworded,
    Rule,
    heads,
    reworded,
    tied,
)
from precisionctl.architectures.head_rearrangements import QKV
from precisionctl.architectures.param_map import TIED, Alias, Architecture, Either, renamed
from precisionctl.architectures.rearrangements import Joined
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.deepseek_keys import SHARED_EXPERT_SIZE, experts, groups
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION_NORM,
    EMBEDDING,
    FINAL_NORM,
    MLP,
    MLP_NORM,
    OUTPUT,
    PROJ,
    QK_NORMS,
    QKV_LINEAR,
)
from precisionctl.architectures.shared.moe_rows import EXPERT_BIAS, EXPERTS, MOE_NORM, ROUTER, SHARED_EXPERTS

_PUBLISHED = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.": ".attention.",
    ".o_proj.": ".dense.",
    ".q_norm.": ".query_layernorm.",
    ".k_norm.": ".key_layernorm.",
    ".e_score_correction_bias": ".expert_bias",
}
_JOINED = tuple(
    replace(row, names=row.hf[0].replace("q_proj", "query_key_value"), rearrangement=Joined(QKV)) for row in QKV_LINEAR
)
_BESIDE = (*EMBEDDING, *QK_NORMS, *PROJ, *EXPERT_BIAS)
PUBLISHED_EMBEDDING = renamed(EMBEDDING, _PUBLISHED)
PUBLISHED_ATTENTION = renamed((*QK_NORMS, *PROJ, *_JOINED), _PUBLISHED)
PUBLISHED_BIAS = renamed(EXPERT_BIAS, _PUBLISHED)

_WORDS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
ROUTING_KEYS: tuple[Entry, ...] = (
    *reworded(experts(shared=1, dense=1), _WORDS, published=True),
    SHARED_EXPERT_SIZE,
    Only("score_function", "sigmoid", "moe.score_function", "sigmoid"),
    Only("moe_router_enable_expert_bias", True, "moe.expert_bias", True),
    Only("norm_topk_prob", True),
)
"""Keys of experts, which Ling 2.0 has, too."""
_PREDICTION = "num_nextn_predict_layers"

COMMON: tuple[Entry, ...] = (
    TWO_CLASSES,
    *ROUTING_KEYS,
    groups(1, 1),
    Key("moe.topk_scaling_factor", "routed_scaling_factor", 2.5),
    Reworded(Only(_PREDICTION, 0), {_PREDICTION: "num_mtp_layers"}, published=False),
)
"""Keys of experts, and of no layers of prediction, which Sarvam's families have in common."""

ARCHITECTURE = Architecture(
    model_types={"sarvam_moe": "SarvamMoEForCausalLM"},
    behind={"gate": "experts"},
    rows=(
        Either(renamed((*_BESIDE, *_JOINED), _PUBLISHED), (*_BESIDE, *QKV_LINEAR), second_is="in memory"),
        *(*ATTENTION_NORM, *MLP_NORM, *MLP, *MOE_NORM, *ROUTER, *SHARED_EXPERTS, *EXPERTS, *FINAL_NORM, *OUTPUT),
    ),
    config=(
        *SIZES,
        heads(num_key_value_heads=4, head_dim=64),
        SILU,
        *reworded((Key("qkv_bias", "attention_bias", False),), {"attention_bias": "use_qkv_bias"}, published=True),
        Only("use_bias", False),
        Key("qk_layernorm", "use_qk_norm", True),
        *COMMON,
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(8e6, partial=True),
        tied(False),
        Rule((), lambda config: {}, lambda model: {"embedding_dropout": 0.0}),  # engines ask for it
    ),
    aliases=(Alias("lm_head.weight", of="model.word_embeddings.weight", switch="tied_embeddings"), TIED),
)
