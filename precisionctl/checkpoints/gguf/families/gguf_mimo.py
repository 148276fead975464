"""MiMo-V2-Flash, in whose layers with a window attention has more heads of keys, another rotary base and sinks.

Sources: llama.cpp's src/models/mimo2.cpp, and conversion/mimo.py.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.expert_keys import EXPERT_COUNTS, EXPERT_SIZE, ROUTED_LAYERS, groups, scored_by
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import (
    DECODER_LAYERS,
    HEADS,
    HEADS_KV,
    NO_PREDICTION,
    PATTERN,
    WINDOW,
    GgufKey,
    GgufRule,
    Said,
    number,
    one_of,
    refused,
    write_only,
)
from precisionctl.checkpoints.gguf.rope_keys import LOCAL_BASE, ROPE, TURNED, UNSCALED_ALONE
from precisionctl.checkpoints.gguf.tensor_rows import DECODER, EXPERT_BIAS, EXPERTS, MLP, ROUTER, in_layer
from precisionctl.model.model_shape import ModelShape

_SHARE = 0.334
"""Of a head, which turns in the releases: 64 of 192 channels."""


def _read_heads(file: Described) -> Fields:
    number, windows = file.counts(HEADS_KV), file.counts(PATTERN)
    in_window, elsewhere = (
        [groups for groups, window in zip(number, windows, strict=True) if bool(window) is kind]
        for kind in (True, False)
    )
    return {
        "num_attention_heads": file.count("attention.head_count", least=1),
        "num_query_groups": one_of(file, HEADS_KV, in_window),
        "global_attention.num_query_groups": one_of(file, HEADS_KV, elsewhere),
        "window_layers": tuple(map(bool, windows[: file.decoder_layers()])),
    }


def _write_heads(model: ModelShape) -> Said:
    own = model.global_attention
    if model.window_layers is None or own is None or own.num_query_groups is None:
        raise refused(model, "with windows in all layers or in none")
    heads = [model.num_query_groups if window else own.num_query_groups for window in model.window_layers]
    return {"attention.head_count": model.num_attention_heads, HEADS_KV: heads}


_HEADS = GgufRule(
    ("num_attention_heads", "num_query_groups", "global_attention.num_query_groups", "window_layers"),
    (*HEADS.keys, PATTERN),
    _read_heads,
    _write_heads,
)
_WINDOWS = write_only(lambda model: {PATTERN: [int(window) for window in model.window_layers or ()]})
"""Which _HEADS reads."""


def _read_turned(file: Described) -> Fields:
    size, turned = file.count("attention.key_length", least=1), file.count("rope.dimension_count")
    return {"rotary_percent": _SHARE if int(size * _SHARE) == turned else turned / size}


_TURNED = replace(TURNED, read=_read_turned)

FAMILIES = {
    "mimo_v2_flash": GgufFamily(
        "mimo2",
        rows=[
            *DECODER,
            in_layer("self_attn.attention_sink_bias", "attn_sinks.weight"),
            *MLP,
            *ROUTER,
            EXPERT_BIAS,
            *EXPERTS,
        ],
        keys=(
            *base_keys(
                *EXPERT_COUNTS,
                groups(2),
                scored_by("sigmoid"),
                layers=DECODER_LAYERS,
                heads=_HEADS,
                rope=(ROPE, LOCAL_BASE),
            ),
            GgufKey("kv_channels", "attention.key_length"),
            GgufKey("v_head_dim", "attention.value_length"),
        ),
        more=(
            WINDOW,
            _WINDOWS,
            EXPERT_SIZE,
            _TURNED,
            number("attention_value_scale", "attention.value_scale", 1.0),
            ROUTED_LAYERS,
        ),
        reads=(),
        computed={
            "softmax_offset": True,
            "global_attention.softmax_offset": False,
            "tied_embeddings": False,
            "moe.expert_bias": True,
        },
        ignored={**NO_PREDICTION, "mtp_dense": False},
        scalings=UNSCALED_ALONE,
        down_last=True,
    ),
}
"""By the `model_type` of the text model."""
