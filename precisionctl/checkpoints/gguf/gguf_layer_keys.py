"""What the metadata of a GGUF file say of models whose layers are of several kinds: often a list of a value for each
layer.

Sources: llama.cpp's src/models/*.cpp (load_arch_hparams), and conversion/*.py (set_gguf_parameters).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from precisionctl.checkpoints.gguf.gguf_experts import EXPERT_SIZE, EXPERTS, SHARED_EXPERT_SIZE, WEIGHTS_SCALE
from precisionctl.checkpoints.gguf.gguf_keys import WINDOWS, Fields, Key, Rule, Said, refused
from precisionctl.checkpoints.gguf.gguf_metadata import Described
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model_parts import GlobalAttention, MoE
from precisionctl.model_shape import ModelShape

_HEADS_KV = "attention.head_count_kv"


def _one_of(file: Described, key: str, numbers: Sequence[int]) -> int:
    """The number that all layers have of which it is not 0. Raises UnknownArchitecture if they have several."""
    several = sorted({number for number in numbers if number})
    if len(several) > 1:
        what = f"{file.architecture}.{key} is {shown(list(numbers))}, of several sizes"
        raise UnknownArchitecture(what, where=file.where, do="Start from the release.")
    return several[0] if several else 0


# Short convolutions (LFM2)


def _read_convolutions(file: Described) -> Fields:
    heads, listed = file.count("attention.head_count", least=1), file.counts(_HEADS_KV)
    return {
        "num_attention_heads": heads,
        "num_query_groups": _one_of(file, _HEADS_KV, listed) or heads,
        "short_conv.layers": tuple(not number for number in listed),
    }


def _write_convolutions(model: ModelShape) -> Said:
    heads = [0 if model.has_short_conv(layer) else model.num_query_groups for layer in range(model.num_layers)]
    return {"attention.head_count": model.num_attention_heads, _HEADS_KV: heads}


CONVOLUTIONS = Rule(
    ("num_attention_heads", "num_query_groups", "short_conv.layers"), _read_convolutions, _write_convolutions
)
TAPS = Key("short_conv.kernel_dim", "shortconv.l_cache")


# Mixers (Nemotron-H)


def _read_pattern(file: Described) -> Fields:
    groups, channels = file.counts(_HEADS_KV), file.counts("feed_forward_length")
    sparse = "E" if file.count("expert_count", 0) else "-"
    of_layers = ["*" if heads else sparse if size else "M" for heads, size in zip(groups, channels, strict=True)]
    layers, heads = len(of_layers), file.count("attention.head_count", least=1)
    found: dict[str, Any] = {
        "num_layers": layers,
        "mamba.pattern": "".join(of_layers),
        "num_attention_heads": heads,
        "num_query_groups": _one_of(file, _HEADS_KV, groups) or heads,
        "ffn_hidden_size": _one_of(file, "feed_forward_length", channels) or file.count("embedding_length"),
    }
    return found | ({"moe.layer_freq": tuple(kind == "E" for kind in of_layers)} if "E" in of_layers else {})


def _write_pattern(model: ModelShape) -> Said:
    assert model.mamba
    pattern = model.mamba.pattern
    if {"E", "-"} <= {*pattern}:
        raise refused(model, "with experts in some layers and an MLP in others")
    size = model.moe.ffn_hidden_size if model.moe else model.ffn_hidden_size
    return {
        "block_count": len(pattern),
        "context_length": 1 << 20,
        "embedding_length": model.hidden_size,
        "feed_forward_length": [size if kind in "E-" else 0 for kind in pattern],
        "attention.head_count": model.num_attention_heads,
        _HEADS_KV: [model.num_query_groups if kind == "*" else 0 for kind in pattern],
    }


PATTERN = Rule(
    (
        *("num_layers", "mamba.pattern", "max_position_embeddings", "hidden_size", "ffn_hidden_size"),
        *("num_attention_heads", "num_query_groups", "moe.layer_freq"),
    ),
    lambda file: {
        "hidden_size": file.count("embedding_length"),
        "max_position_embeddings": file.count("context_length"),
        **_read_pattern(file),
    },
    _write_pattern,
)
"""A layer has attention, an MLP or experts, or a mixer. No position limits the context."""


def _read_mixer(file: Described) -> Fields:
    heads, size = file.count("ssm.time_step_rank", least=1), file.count("ssm.inner_size")
    file.expect("ssm.conv_kernel", 4)
    file.expect("rope.scaling.finetuned", False)
    return {
        "mamba.num_heads": heads,
        "mamba.head_dim": size // heads,
        "mamba.num_groups": file.count("ssm.group_count"),
        "mamba.state_dim": file.count("ssm.state_size"),
    }


def _write_mixer(model: ModelShape) -> Said:
    assert model.mamba
    return {
        "ssm.conv_kernel": model.mamba.conv_kernel_dim,
        "ssm.state_size": model.mamba.state_dim,
        "ssm.group_count": model.mamba.num_groups,
        "ssm.inner_size": model.mamba.inner_size,
        "ssm.time_step_rank": model.mamba.num_heads,
        "rope.scaling.finetuned": False,
    }


MIXER = Rule(("mamba.num_heads", "mamba.head_dim", "mamba.num_groups", "mamba.state_dim"), _read_mixer, _write_mixer)
_OF_MOE = tuple(f"moe.{name}" for name in vars(MoE(1, 1, 1, (True,))))


def _read_experts_of_mixers(file: Described) -> Fields:
    if not file.count("expert_count", 0):
        return {}
    file.expect("expert_weights_norm", True)
    file.expect("expert_shared_count", 1)
    said = {key: value for entry in (*EXPERTS, *_OF_MIXERS) for key, value in entry.read(file).items()}
    groups = {
        "moe.num_groups": file.count("expert_group_count", 1),
        "moe.group_topk": file.count("expert_group_used_count", 1),
        "moe.group_scores": 2,
    }
    latents = {"moe.latent_size": file.count("moe_latent_size", 0) or None}
    return {**said, **groups, **latents, "moe.score_function": "sigmoid", "moe.expert_bias": True}


def _write_experts_of_mixers(model: ModelShape) -> Said:
    if model.moe is None:
        return {}
    computed = MoE(
        model.moe.num_experts,
        model.moe.topk,
        model.moe.ffn_hidden_size,
        model.moe.layer_freq,
        shared_ffn_hidden_size=model.moe.shared_ffn_hidden_size,
        score_function="sigmoid",
        topk_scaling_factor=model.moe.topk_scaling_factor,
        expert_bias=True,
        num_groups=model.moe.num_groups,
        group_topk=model.moe.group_topk,
        group_scores=2,
        latent_size=model.moe.latent_size,
    )
    if model.moe != computed or model.moe.shared_ffn_hidden_size is None:
        raise refused(model, "with other experts than Nemotron 3's")
    counts = {key: value for entry in EXPERTS for key, value in entry.write(model).items()}
    groups = {"expert_group_count": model.moe.num_groups or 1, "expert_group_used_count": model.moe.group_topk or 1}
    return {**counts, **groups}


def _write_sizes_of_experts(model: ModelShape) -> Said:
    if model.moe is None:
        return {}
    size, shared, scale = (entry.write(model) for entry in _OF_MIXERS)
    latents = {} if model.moe.latent_size is None else {"moe_latent_size": model.moe.latent_size}
    return {**size, **shared, "expert_shared_count": 1, "expert_weights_norm": True, **scale, **latents}


_OF_MIXERS = (EXPERT_SIZE, SHARED_EXPERT_SIZE, WEIGHTS_SCALE)
EXPERTS_OF_MIXERS = Rule(_OF_MOE, _read_experts_of_mixers, _write_experts_of_mixers)
SIZES_OF_EXPERTS_OF_MIXERS = Rule((), lambda file: {}, _write_sizes_of_experts)
"""Which EXPERTS_OF_MIXERS reads."""
NO_POSITIONS = Rule(
    (),
    lambda file: {
        "rotary_base": 10000.0,
        "rope_scaling": None,
        "rope_layers": (False,) * file.count("block_count"),
    },
)
"""Of attention."""


# Gemma 4


def _read_gemma4_heads(file: Described) -> Fields:
    windows, groups = file.flags("attention.sliding_window_pattern") or [], file.counts(_HEADS_KV)
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
        "num_query_groups": _one_of(file, _HEADS_KV, local or groups),
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
        return {_HEADS_KV: own}
    windows = [model.in_window(layer) for layer in range(model.num_layers)]
    return {_HEADS_KV: [model.num_query_groups if window else int(own or 0) for window in windows]}


GEMMA4_HEADS = Rule(
    (
        *("num_query_groups", "kv_channels", "global_attention.num_query_groups"),
        *("global_attention.kv_channels", "global_attention.keys_are_values"),
    ),
    _read_gemma4_heads,
    _write_gemma4_groups,
)
GEMMA4_HEAD_SIZE = Rule(
    (),
    lambda file: {},
    lambda model: dict.fromkeys(
        ("attention.key_length", "attention.value_length"), _everywhere(model).kv_channels or 0
    ),
)
GEMMA4_LOCAL_SIZE = Rule(
    (),
    lambda file: {},
    lambda model: dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), model.kv_channels),
)
GEMMA4_TURNED = Rule(
    (),
    lambda file: {},
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


GEMMA4_MLPS = Rule(("ffn_hidden_size", "use_double_wide_mlp"), _read_gemma4_mlps, _write_gemma4_mlps)


def _read_gemma4_experts(file: Described) -> Fields:
    if not file.count("expert_count", 0):
        return {}
    said = {key: value for entry in (*EXPERTS, EXPERT_SIZE) for key, value in entry.read(file).items()}
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
    return {key: value for entry in EXPERTS for key, value in entry.write(model).items()}


GEMMA4_EXPERTS = Rule(_OF_MOE, _read_gemma4_experts, _write_gemma4_experts)
GEMMA4_EXPERT_SIZE = Rule((), lambda file: {}, lambda model: EXPERT_SIZE.write(model) if model.moe else {})
GEMMA4_LAYERS = (
    Key("num_kv_shared_layers", "attention.shared_kv_layers", 0),
    Rule(
        ("per_layer_embed_dim",),
        lambda file: {"per_layer_embed_dim": file.count("embedding_length_per_layer_input") or None},
        lambda model: {"embedding_length_per_layer_input": model.per_layer_embed_dim or 0},
    ),
    WINDOWS,
)
GEMMA4_UNUSED = Rule(
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
