"""Llama-Nemotron Super and Ultra, whose layers have sizes of their own.

Sources: llama.cpp's src/models/deci.cpp and load_hparams in src/llama-model.cpp, and conversion/deci.py.
"""

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf import metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.errors import UnknownArchitecture
from precisionctl.model.model_parts import Heterogeneous
from precisionctl.model.model_shape import ModelShape

_HEADS = "attention.head_count"
_CHANNELS = "feed_forward_length"


def _read_sizes(file: Described) -> Fields:
    heads, groups, channels = (file.counts(key) for key in (_HEADS, keys.HEADS_KV, _CHANNELS))
    for layer, (number, of_keys) in enumerate(zip(heads, groups, strict=True)):
        if bool(number) != bool(of_keys):
            what = f"layer {layer} has {number} heads and {of_keys} of keys, as with a linear in the place of attention"
            raise UnknownArchitecture(what, do="Start from the release.")
    sizes = Heterogeneous(tuple(groups), tuple(channels))
    return {
        "num_attention_heads": keys.one_of(file, _HEADS, heads),
        **sizes.largest,
        **{f"heterogeneous.{name}": of_layers for name, of_layers in vars(sizes).items()},
    }


def _write_sizes(model: ModelShape) -> keys.Said:
    """llama.cpp takes the size of a head of the first layer's number of heads, and of a layer without an MLP passes
    over attention, too."""
    sizes = model.heterogeneous
    assert sizes
    groups, channels = map(list, (sizes.num_query_groups, sizes.ffn_hidden_size))
    if not groups[0]:
        raise keys.refused(model, "without attention in the first layer")
    if not channels[-1] or any(of_keys and not each for of_keys, each in zip(groups, channels, strict=True)):
        raise keys.refused(model, "with attention and no MLP in a layer, or no MLP in the last")
    heads = [model.num_attention_heads if of_keys else 0 for of_keys in groups]
    return {keys.HEADS_KV: groups, _HEADS: heads, _CHANNELS: channels}


_SIZES = keys.GgufEntry(
    (
        *("num_attention_heads", "num_query_groups", "ffn_hidden_size"),
        *("heterogeneous.num_query_groups", "heterogeneous.ffn_hidden_size"),
    ),
    (_HEADS, keys.HEADS_KV, _CHANNELS),
    _read_sizes,
    _write_sizes,
)

FAMILIES = {
    "nemotron-nas": GgufFamily(
        "deci",
        rows=[*rows.DECODER_IN_PAIRS, *rows.MLP],
        keys=(rope_keys.ROPE, _SIZES, keys.LAYERS, keys.CONTEXT, keys.WIDTH, keys.EPSILON, keys.HEAD_SIZE),
        more=(keys.VOCABULARY, rope_keys.TURNED, keys.ATTENTION_BIAS, keys.MLP_BIAS),
        scalings=rope_keys.AND_LLAMA3,
    ),
}
