"""config.json's keys that Kimi Linear and Ling 3 have in common."""

from collections.abc import Mapping

from precisionctl.architectures.config_keys import Config, Entry, Key, Only, Reworded, Rule, reworded
from precisionctl.architectures.deepseek_keys import (
    SIGMOID,
    experts_by_list,
    groups,
    latent_attention,
    shared_experts,
)
from precisionctl.model_shape import ModelShape

_WORDS: Mapping[str, str] = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
}
"""DeepSeek's, and the ones that both families' classes save."""


def common(published: bool, number: int, group_counts: tuple[int, int], scaling: float) -> tuple[Entry, ...]:
    """Latent attention and experts, with defaults of the family's class: `number` of experts, in groups. Are the words
    that classes save also those of published files?"""
    entries: tuple[Entry, ...] = (
        *latent_attention(None),
        Key("moe.num_experts", "num_experts", number, synonym="num_local_experts"),
        Key("moe.topk", "num_experts_per_tok", 8),
        Key("moe.ffn_hidden_size", "moe_intermediate_size"),
        Reworded(shared_experts("num_shared_experts", 1), {"num_shared_experts": "n_shared_experts"}, False),
        groups(*group_counts),
        *SIGMOID,
        Only("norm_topk_prob", True),
        Key("moe.topk_scaling_factor", "routed_scaling_factor", scaling),
        Only("tie_word_embeddings", False),
    )
    return reworded(entries, _WORDS, published)


def sparse_layers(dense: int) -> Rule:
    """Which layers have experts; without a list, all but the first ones: `dense` of them where no key says how many.
    Engines look for that number alone."""
    key = "first_k_dense_replace"
    listed = experts_by_list(dense, key)

    def write(model: ModelShape) -> Config:
        without = [layer for layer in range(model.num_layers) if not model.has_experts(layer)]
        return {**listed.write(model), **({key: len(without)} if without == [*range(len(without))] else {})}

    return Rule(listed.keys, listed.read, write)
