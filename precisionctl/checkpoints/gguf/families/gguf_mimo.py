"""MiMo-V2-Flash, in whose layers with a window attention has more heads of keys, another rotary base and sinks.

Sources: llama.cpp's src/models/mimo2.cpp, and conversion/mimo.py.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.model.model_shape import ModelShape

_SHARE = 0.334
"""Of a head, which turns in the releases: 64 of 192 channels."""


def _read_heads(file: Described) -> Fields:
    number, windows = file.counts(keys.HEADS_KV), file.counts(keys.PATTERN)
    in_window, elsewhere = (
        [groups for groups, window in zip(number, windows, strict=True) if bool(window) is kind]
        for kind in (True, False)
    )
    return {
        "num_attention_heads": file.count("attention.head_count", least=1),
        "num_query_groups": keys.one_of(file, keys.HEADS_KV, in_window),
        "global_attention.num_query_groups": keys.one_of(file, keys.HEADS_KV, elsewhere),
        "window_layers": tuple(map(bool, windows[: file.decoder_layers()])),
    }


def _write_heads(model: ModelShape) -> keys.Said:
    own = model.global_attention
    if model.window_layers is None or own is None or own.num_query_groups is None:
        raise keys.refused(model, "with windows in all layers or in none")
    heads = [model.num_query_groups if window else own.num_query_groups for window in model.window_layers]
    return {"attention.head_count": model.num_attention_heads, keys.HEADS_KV: heads}


_HEADS = keys.GgufEntry(
    ("num_attention_heads", "num_query_groups", "global_attention.num_query_groups", "window_layers"),
    (*keys.HEADS.keys, keys.PATTERN),
    _read_heads,
    _write_heads,
)
_WINDOWS = keys.write_only(lambda model: {keys.PATTERN: [int(window) for window in model.window_layers or ()]})
"""Which _HEADS reads."""


def _read_turned(file: Described) -> Fields:
    size, turned = file.count("attention.key_length", least=1), file.count("rope.dimension_count")
    return {"rotary_percent": _SHARE if int(size * _SHARE) == turned else turned / size}


_TURNED = replace(rope_keys.TURNED, read=_read_turned)

FAMILIES = {
    "mimo_v2_flash": GgufFamily(
        "mimo2",
        rows=[
            *rows.DECODER,
            rows.in_layer("self_attn.attention_sink_bias", "attn_sinks.weight"),
            *rows.MLP,
            *rows.ROUTER,
            rows.EXPERT_BIAS,
            *rows.EXPERTS,
        ],
        keys=(
            *base_keys(
                *expert_keys.DEEPSEEK_CHOICE,
                layers=keys.DECODER_LAYERS,
                heads=_HEADS,
                rope=(rope_keys.ROPE, rope_keys.LOCAL_BASE),
                head_size=None,
            ),
            keys.integer("kv_channels", "attention.key_length"),
            keys.integer("v_head_dim", "attention.value_length"),
        ),
        more=(
            keys.WINDOW,
            _WINDOWS,
            expert_keys.EXPERT_SIZE,
            _TURNED,
            keys.number("attention_value_scale", "attention.value_scale", 1.0),
            expert_keys.ROUTED_LAYERS,
        ),
        computed={
            "softmax_offset": True,
            "global_attention.softmax_offset": False,
            "tied_embeddings": False,
            "moe.expert_bias": True,
        },
        ignored={**keys.NO_PREDICTION, "mtp_dense": False},
        scalings=rope_keys.UNSCALED_ALONE,
        down_last=True,
    ),
}
