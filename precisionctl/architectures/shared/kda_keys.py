"""config.json's keys that Kimi Linear and Ling 3 have in common."""

from collections.abc import Mapping

from precisionctl.architectures.config_keys import Config, Entry, Key, Only, Reworded, reworded
from precisionctl.architectures.config_layers import numbered_layers
from precisionctl.architectures.shared.deepseek_keys import SIGMOID, groups, latent_attention, shared_experts
from precisionctl.errors import DamagedCheckpoint
from precisionctl.model.model_shape import ModelShape

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


LISTS = ("kda_layers", "full_attn_layers")
"""Of `linear_attn_config`: the numbers of layers with delta attention, and of those without, counting from 1."""


def shared_out(said: Config, number: int, where: object) -> list[bool]:
    """Whether each of so many layers has delta attention, as the LISTS say. Raises DamagedCheckpoint unless each layer
    is in one of them."""
    of_kda, full = (numbered_layers(said[key], key, where) for key in LISTS)
    if of_kda & full or of_kda | full != {*range(1, number + 1)}:
        what = f"kda_layers and full_attn_layers do not share out layers 1 to {number}"
        raise DamagedCheckpoint(what, where=where, do="Is config.json this model's?")
    return [layer + 1 in of_kda for layer in range(number)]


def layer_lists(model: ModelShape) -> Config:
    """The inverse."""
    numbers = range(1, model.num_layers + 1)
    kinds = ([layer for layer in numbers if model.has_delta_net(layer - 1) is kind] for kind in (True, False))
    return dict(zip(LISTS, kinds, strict=True))
