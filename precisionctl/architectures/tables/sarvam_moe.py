"""Sarvam 30B: GLM-4.5's experts behind attention whose heads turn whole, under Ling's names.

Traps: queries, keys and values are one tensor, all of each after the other, in published files and in what transformers
saves, and three in its memory. Published files have other words than transformers for three keys of config.json, and
say more, which engines ask for and its class does not write.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.head_rearrangements import QKV
from precisionctl.architectures.param_map import TIED, Alias, Architecture, Either, renamed
from precisionctl.architectures.rearrangements import Joined
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import deepseek_keys, llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.llama_keys import llama_keys

_PUBLISHED = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.": ".attention.",
    ".o_proj.": ".dense.",
    ".q_norm.": ".query_layernorm.",
    ".k_norm.": ".key_layernorm.",
    ".e_score_correction_bias": ".expert_bias",
}
_JOINED = tuple(
    replace(row, names=row.hf[0].replace("q_proj", "query_key_value"), rearrangement=Joined(QKV))
    for row in llama.QKV_LINEAR
)
_BESIDE = (*llama.EMBEDDING, *llama.QK_NORMS, *llama.PROJ, *moe.EXPERT_BIAS)
PUBLISHED_EMBEDDING = renamed(llama.EMBEDDING, _PUBLISHED)
PUBLISHED_ATTENTION = renamed((*llama.QK_NORMS, *llama.PROJ, *_JOINED), _PUBLISHED)
PUBLISHED_BIAS = renamed(moe.EXPERT_BIAS, _PUBLISHED)

_WORDS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
ROUTING_KEYS: tuple[keys.Entry, ...] = (
    *keys.reworded(deepseek_keys.experts(shared=1, dense=1), _WORDS, published=True),
    deepseek_keys.SHARED_EXPERT_SIZE,
    keys.only("score_function", "sigmoid", "moe.score_function", "sigmoid"),
    keys.only("moe_router_enable_expert_bias", True, "moe.expert_bias", True),
    keys.only("norm_topk_prob", True),
)
"""Keys of experts, which Ling 2.0 has, too."""
_PREDICTION = "num_nextn_predict_layers"

COMMON: tuple[keys.Entry, ...] = (
    keys.TWO_CLASSES,
    *ROUTING_KEYS,
    deepseek_keys.groups(1, 1),
    keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 2.5),
    keys.Reworded(keys.only(_PREDICTION, 0), {_PREDICTION: "num_mtp_layers"}, published=False),
)
"""Keys of experts, and of no layers of prediction, which Sarvam's families have in common."""

ARCHITECTURE = Architecture(
    model_types={"sarvam_moe": "SarvamMoEForCausalLM"},
    behind={"gate": "experts"},
    rows=(
        Either(renamed((*_BESIDE, *_JOINED), _PUBLISHED), in_memory=(*_BESIDE, *llama.QKV_LINEAR)),
        *(
            *llama.ATTENTION_NORM,
            *llama.MLP_NORM,
            *llama.MLP,
            *moe.MOE_NORM,
            *moe.WIDE_ROUTER,
            *moe.SHARED_EXPERTS,
            *moe.EXPERTS,
            *llama.FINAL_NORM,
            *llama.OUTPUT,
        ),
    ),
    config=(
        *llama_keys(
            *keys.reworded(
                (keys.Key("qkv_bias", "attention_bias", False),), {"attention_bias": "use_qkv_bias"}, published=True
            ),
            keys.only("use_bias", False),
            keys.Key("qk_layernorm", "use_qk_norm", True),
            *COMMON,
            heads=keys.heads(num_key_value_heads=4, head_dim=64),
            rotary=rope(8e6, partial=True),
        ),
        keys.Rule((), write=lambda model: {"embedding_dropout": 0.0}),  # engines ask for it
    ),
    aliases=(Alias("lm_head.weight", of="model.word_embeddings.weight", switch="tied_embeddings"), TIED),
)
