"""What the metadata of a GGUF file say of Gemma 4, in whose layers with a window attention has other sizes.

Sources: llama.cpp's src/models/gemma4.cpp, and conversion/gemma.py (Gemma4Model).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.gguf_experts import EXPERT_SIZE, EXPERTS
from precisionctl.checkpoints.gguf.gguf_keys import (
    WINDOWS,
    GgufKey,
    GgufRule,
    Said,
    read_each,
    refused,
    write_each,
    write_only,
)
from precisionctl.checkpoints.gguf.gguf_layer_keys import HEADS_KV, OF_MOE, one_of
from precisionctl.checkpoints.gguf.gguf_metadata import Described
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model_parts import GlobalAttention, MoE
from precisionctl.model_shape import ModelShape


def _read_gemma4_heads(file: Described) -> Fields:
    windows, groups = file.flags("attention.sliding_window_pattern") or [], file.counts(HEADS_KV)
    if len(windows) != len(groups) or all(windows):
        what = f"{file.architecture}.attention.sliding_window_pattern is {shown(windows)}"
        do = "Known are models with windows in some layers, of which it is a list."
        raise UnknownArchitecture(what, where=file.where, do=do)
    everywhere = windows.index(False)
    local = [number for number, window in zip(groups, windows, strict=True) if window]
    size, size_in_window = file.count("attention.key_length", least=1), file.count("attention.key_length_swa", least=1)
    for key, expected in (
        ("attention.value_length", size),
        ("attention.value_length_swa", size_in_window),
        ("rope.dimension_count", size),
        ("rope.dimension_count_swa", size_in_window),
    ):
        file.expect(key, expected)
    return {
        "num_query_groups": one_of(file, HEADS_KV, local or groups),
        "kv_channels": size_in_window,
        "global_attention.num_query_groups": groups[everywhere],
        "global_attention.kv_channels": size,
        "global_attention.keys_are_values": not file.has(f"blk.{everywhere}.attn_v.weight"),
    }


def _everywhere(model: ModelShape) -> GlobalAttention:
    """What layers without a window have."""
    own = model.global_attention or GlobalAttention()
    return replace(
        own,
        num_query_groups=own.num_query_groups or model.num_query_groups,
        kv_channels=own.kv_channels or model.kv_channels,
    )


def _write_gemma4_groups(model: ModelShape) -> Said:
    own = _everywhere(model).num_query_groups
    if own == model.num_query_groups:
        return {HEADS_KV: own}
    windows = [model.in_window(layer) for layer in range(model.num_layers)]
    return {HEADS_KV: [model.num_query_groups if window else int(own or 0) for window in windows]}


GEMMA4_HEADS = GgufRule(
    (
        *("num_query_groups", "kv_channels", "global_attention.num_query_groups"),
        *("global_attention.kv_channels", "global_attention.keys_are_values"),
    ),
    _read_gemma4_heads,
    _write_gemma4_groups,
)
GEMMA4_HEAD_SIZE = write_only(
    lambda model: dict.fromkeys(
        ("attention.key_length", "attention.value_length"), _everywhere(model).kv_channels or 0
    ),
)
GEMMA4_LOCAL_SIZE = write_only(
    lambda model: dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), model.kv_channels),
)
GEMMA4_TURNED = write_only(
    lambda model: {
        "rope.dimension_count": _everywhere(model).kv_channels or 0,
        "rope.dimension_count_swa": model.kv_channels,
    },
)
"""What GEMMA4_HEADS reads."""


def _read_gemma4_mlps(file: Described) -> Fields:
    channels = file.counts("feed_forward_length")
    if {*channels} - {channels[0], 2 * channels[0]}:
        what = f"{file.architecture}.feed_forward_length is {shown(channels)}, neither one size nor twice that"
        raise UnknownArchitecture(what, where=file.where, do="Start from the release.")
    return {"ffn_hidden_size": channels[0], "use_double_wide_mlp": channels[-1] != channels[0]}


def _write_gemma4_mlps(model: ModelShape) -> Said:
    size, wide = model.ffn_hidden_size, model.num_layers - model.num_kv_shared_layers
    if not model.use_double_wide_mlp:
        return {"feed_forward_length": size}
    return {"feed_forward_length": [size if layer < wide else 2 * size for layer in range(model.num_layers)]}


GEMMA4_MLPS = GgufRule(("ffn_hidden_size", "use_double_wide_mlp"), _read_gemma4_mlps, _write_gemma4_mlps)


def _read_gemma4_experts(file: Described) -> Fields:
    if not file.count("expert_count", 0):
        return {}
    said = read_each((*EXPERTS, EXPERT_SIZE), file)
    shared = _read_gemma4_mlps(file)["ffn_hidden_size"]
    beside = {"moe.layer_freq": (True,) * file.count("block_count"), "moe.own_norms": True}
    return {**said, **beside, "moe.shared_ffn_hidden_size": shared}


def _write_gemma4_experts(model: ModelShape) -> Said:
    if model.moe is None:
        return {}
    of_llama_cpp = MoE(
        model.moe.num_experts,
        model.moe.topk,
        model.moe.ffn_hidden_size,
        (True,) * model.num_layers,
        shared_ffn_hidden_size=model.ffn_hidden_size,
        own_norms=True,
    )
    if model.moe != of_llama_cpp:
        raise refused(model, "with other experts than Gemma 4's")
    return write_each(EXPERTS, model)


GEMMA4_EXPERTS = GgufRule(OF_MOE, _read_gemma4_experts, _write_gemma4_experts)
GEMMA4_EXPERT_SIZE = write_only(lambda model: EXPERT_SIZE.write(model) if model.moe else {})
GEMMA4_LAYERS = (
    GgufKey("num_kv_shared_layers", "attention.shared_kv_layers", 0),
    GgufRule(
        ("per_layer_embed_dim",),
        lambda file: {"per_layer_embed_dim": file.count("embedding_length_per_layer_input") or None},
        lambda model: {"embedding_length_per_layer_input": model.per_layer_embed_dim or 0},
    ),
    WINDOWS,
)
GEMMA4_UNUSED = GgufRule(
    ("stores_unused",),
    lambda file: {
        "stores_unused": bool(file.count("attention.shared_kv_layers", 0))
        and file.has(f"blk.{file.count('block_count') - 1}.attn_k.weight")
    },
)
GEMMA4_COMPUTED: Mapping[str, Any] = {
    "activation": "gelu_tanh",
    "embedding_multiplier": lambda fields: math.sqrt(fields["hidden_size"]),
    "rounded_embedding_multiplier": True,
    **dict.fromkeys(("post_layernorms", "qk_layernorm", "v_l2_norm", "layer_scalar"), True),
    "query_pre_attn_scalar": 1.0,
}
