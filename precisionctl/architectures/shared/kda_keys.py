"""config.json's keys that families with Kimi delta attention have in common."""

from collections.abc import Mapping

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import numbered_layers
from precisionctl.architectures.shared import deepseek_keys
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import GatedDeltaNet

_WORDS: Mapping[str, str] = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
}
"""DeepSeek's, and the ones that the classes of Kimi Linear and Ling 3 save."""


def common(published: bool, number: int, group_counts: tuple[int, int], scaling: float) -> tuple[keys.Entry, ...]:
    """Latent attention and experts, with defaults of the family's class: `number` of experts, in groups. Are the words
    that classes save also those of published files?"""
    entries: tuple[keys.Entry, ...] = (
        *deepseek_keys.latent_attention(None),
        keys.Key("moe.num_experts", "num_experts", number, synonym="num_local_experts"),
        keys.Key("moe.topk", "num_experts_per_tok", 8),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size"),
        keys.Reworded(
            deepseek_keys.shared_experts("num_shared_experts", 1), {"num_shared_experts": "n_shared_experts"}, False
        ),
        deepseek_keys.groups(*group_counts),
        *deepseek_keys.SIGMOID,
        keys.only("norm_topk_prob", True),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", scaling),
        keys.only("tie_word_embeddings", False),
    )
    return keys.reworded(entries, _WORDS, published)


LISTS = ("kda_layers", "full_attn_layers")
"""Of `linear_attn_config`: the numbers of layers with delta attention, and of those without."""

BESIDE = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Of `linear_attn_config`: sizes, with transformers' words for them beside it."""


def checked(said: object, family: str, *more: str) -> keys.Config:
    """A `linear_attn_config` of sizes, LISTS and these keys. Raises DamagedCheckpoint for what is no object, and
    UnknownArchitecture for other keys."""
    found = keys.as_object(said, "linear_attn_config")
    for key in found:
        if key not in (*BESIDE, *LISTS, *more):
            what = f"no {family} known here has linear_attn_config.{key}={shown(found[key])}"
            raise UnknownArchitecture(what)
    return found


def read_sizes(said: keys.Config, config: keys.Config, absent: Mapping[str, int]) -> keys.Fields:
    """What a `linear_attn_config` says of the sizes of delta attention, or `config` in transformers' words; else they
    are as `absent` has them."""
    sizes = []
    for inner, beside in BESIDE.items():
        holds, key = (config, beside) if inner not in said and beside in config else (said, inner)
        sizes.append(keys.size(holds, key, absent=absent.get(inner)))
    head, number, taps = sizes
    return {
        **dict.fromkeys(("gdn.key_head_dim", "gdn.value_head_dim", "gdn.kda_lora_rank"), head),
        **dict.fromkeys(("gdn.num_key_heads", "gdn.num_value_heads"), number),
        "gdn.conv_kernel_dim": taps,
        "gdn.kda": True,
    }


def write_sizes(gdn: GatedDeltaNet) -> keys.Config:
    """The inverse, of `linear_attn_config`."""
    return dict(zip(BESIDE, (gdn.key_head_dim, gdn.num_key_heads, gdn.conv_kernel_dim), strict=True))


def shared_out(said: keys.Config, number: int) -> list[bool]:
    """Whether each of so many layers has delta attention, as the LISTS say, which count from 1. Raises
    DamagedCheckpoint unless each layer is in one of them."""
    of_kda, full = (numbered_layers(said[key], key) for key in LISTS)
    if of_kda & full or of_kda | full != {*range(1, number + 1)}:
        what = f"kda_layers and full_attn_layers do not share out layers 1 to {number}"
        raise DamagedCheckpoint(what, do="Is config.json this model's?")
    return [layer + 1 in of_kda for layer in range(number)]


def layer_lists(model: ModelShape, first: int = 1) -> keys.Config:
    """The LISTS of a model, counting from `first`."""
    numbers = range(first, first + model.num_layers)
    kinds = ([layer for layer in numbers if model.has_delta_net(layer - first) is kind] for kind in (True, False))
    return dict(zip(LISTS, kinds, strict=True))
