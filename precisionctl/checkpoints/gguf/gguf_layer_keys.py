"""What the metadata of a GGUF file say of models whose layers are of several kinds: often a list of a value for each
layer.

Sources: llama.cpp's src/models/*.cpp (load_arch_hparams), and conversion/*.py (set_gguf_parameters).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.gguf_experts import EXPERT_SIZE, EXPERTS, SHARED_EXPERT_SIZE, WEIGHTS_SCALE, groups
from precisionctl.checkpoints.gguf.gguf_keys import GgufKey, GgufRule, Said, read_each, refused, write_each, write_only
from precisionctl.checkpoints.gguf.gguf_metadata import Described
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model_parts import MoE
from precisionctl.model_shape import ModelShape

HEADS_KV = "attention.head_count_kv"


def one_of(file: Described, key: str, numbers: Sequence[int]) -> int:
    """The number that all layers have of which it is not 0. Raises UnknownArchitecture if they have several."""
    several = sorted({number for number in numbers if number})
    if len(several) > 1:
        what = f"{file.architecture}.{key} is {shown(list(numbers))}, of several sizes"
        raise UnknownArchitecture(what, where=file.where, do="Start from the release.")
    return several[0] if several else 0


def _read_heads(file: Described, groups: Sequence[int]) -> Fields:
    """Heads, and those of keys, which layers without attention have none of."""
    heads = file.count("attention.head_count", least=1)
    return {"num_attention_heads": heads, "num_query_groups": one_of(file, HEADS_KV, groups) or heads}


# Short convolutions (LFM2)


def _read_convolutions(file: Described) -> Fields:
    listed = file.counts(HEADS_KV)
    return {**_read_heads(file, listed), "short_conv.layers": tuple(not number for number in listed)}


def _write_convolutions(model: ModelShape) -> Said:
    heads = [0 if model.has_short_conv(layer) else model.num_query_groups for layer in range(model.num_layers)]
    return {"attention.head_count": model.num_attention_heads, HEADS_KV: heads}


CONVOLUTIONS = GgufRule(
    ("num_attention_heads", "num_query_groups", "short_conv.layers"), _read_convolutions, _write_convolutions
)
TAPS = GgufKey("short_conv.kernel_dim", "shortconv.l_cache")


# Mixers (Nemotron-H)


def _read_pattern(file: Described) -> Fields:
    groups, channels = file.counts(HEADS_KV), file.counts("feed_forward_length")
    sparse = "E" if file.count("expert_count", 0) else "-"
    of_layers = ["*" if heads else sparse if size else "M" for heads, size in zip(groups, channels, strict=True)]
    found: dict[str, Any] = {
        "num_layers": len(of_layers),
        "mamba.pattern": "".join(of_layers),
        **_read_heads(file, groups),
        "ffn_hidden_size": one_of(file, "feed_forward_length", channels) or file.count("embedding_length"),
    }
    return found | ({"moe.layer_freq": tuple(kind == "E" for kind in of_layers)} if sparse == "E" else {})


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
        HEADS_KV: [model.num_query_groups if kind == "*" else 0 for kind in pattern],
    }


PATTERN = GgufRule(
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
    }


MIXER = GgufRule(
    ("mamba.num_heads", "mamba.head_dim", "mamba.num_groups", "mamba.state_dim"), _read_mixer, _write_mixer
)
OF_MOE = tuple(f"moe.{name}" for name in vars(MoE(1, 1, 1, (True,))))


def _read_experts_of_mixers(file: Described) -> Fields:
    if not file.count("expert_count", 0):
        return {}
    file.expect("expert_weights_norm", True)
    file.expect("expert_shared_count", 1)
    said = read_each((*EXPERTS, *_OF_MIXERS), file)
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
    return write_each((*EXPERTS, groups(2)), model)


def _write_sizes_of_experts(model: ModelShape) -> Said:
    if model.moe is None:
        return {}
    size, shared, scale = (entry.write(model) for entry in _OF_MIXERS)
    latents = {} if model.moe.latent_size is None else {"moe_latent_size": model.moe.latent_size}
    return {**size, **shared, "expert_shared_count": 1, "expert_weights_norm": True, **scale, **latents}


_OF_MIXERS = (EXPERT_SIZE, SHARED_EXPERT_SIZE, WEIGHTS_SCALE)
EXPERTS_OF_MIXERS = GgufRule(OF_MOE, _read_experts_of_mixers, _write_experts_of_mixers)
SIZES_OF_EXPERTS_OF_MIXERS = write_only(_write_sizes_of_experts)
"""Which EXPERTS_OF_MIXERS reads."""


def _read_no_positions(file: Described) -> Fields:
    file.expect("rope.scaling.finetuned", False)
    return {"rotary_base": 10000.0, "rope_scaling": None}


NO_POSITIONS = GgufRule((), _read_no_positions, lambda model: {"rope.scaling.finetuned": False})
"""Of attention."""

# Granite 4


def _read_granite(file: Described) -> Fields:
    groups = file.counts(HEADS_KV)
    second = "E" if file.count("expert_count", 0) else "-"
    pattern = "".join(("*" if number else "M") + second for number in groups)
    said = {
        "num_layers": len(pattern),
        "mamba.pattern": pattern,
        **_read_heads(file, groups),
        "max_position_embeddings": file.count("context_length"),
    }
    turned = file.said("rope.scaling.finetuned") is not False
    return {**said, "rope_layers": None if turned else (False,) * len(pattern)}


def _write_granite(model: ModelShape) -> Said:
    pattern = model.mamba.pattern if model.mamba else ""
    if "M" not in pattern:
        raise refused(model, "without mixers")
    groups = [model.num_query_groups if kind == "*" else 0 for kind in pattern[::2]]
    return {
        "block_count": len(groups),
        "context_length": 1 << 20,
        "embedding_length": model.hidden_size,
        "feed_forward_length": model.ffn_hidden_size,
        "attention.head_count": model.num_attention_heads,
        HEADS_KV: groups,
    }


GRANITE_LAYERS = GgufRule(
    (
        *("num_layers", "mamba.pattern", "max_position_embeddings", "hidden_size", "ffn_hidden_size"),
        *("num_attention_heads", "num_query_groups", "rope_layers"),
    ),
    lambda file: {
        "hidden_size": file.count("embedding_length"),
        "ffn_hidden_size": file.count("feed_forward_length"),
        **_read_granite(file),
    },
    _write_granite,
)
"""A layer of GGUF is two of Megatron's."""


def _read_granite_experts(file: Described) -> Fields:
    shared = file.count("expert_shared_feed_forward_length", 0)
    if not file.count("expert_count", 0):
        file.count("expert_used_count", 0)
        return {}
    return {
        **read_each(EXPERTS, file),
        "moe.ffn_hidden_size": file.count("feed_forward_length"),
        "moe.shared_ffn_hidden_size": shared or None,
        "moe.layer_freq": (False, True) * file.count("block_count"),
    }


def _write_granite_experts(model: ModelShape) -> Said:
    if model.moe is None:
        return {"expert_count": 0, "expert_used_count": 0}
    moe = model.moe
    known = MoE(moe.num_experts, moe.topk, model.ffn_hidden_size, (False, True) * (model.num_layers // 2))
    if moe != replace(known, shared_ffn_hidden_size=moe.shared_ffn_hidden_size):
        raise refused(model, "with other experts than Granite 4's")
    return write_each(EXPERTS, model)


GRANITE_EXPERTS = GgufRule(OF_MOE, _read_granite_experts, _write_granite_experts)
GRANITE_SHARED_SIZE = write_only(
    lambda model: {
        "expert_shared_feed_forward_length": (model.moe.shared_ffn_hidden_size if model.moe else model.ffn_hidden_size)
        or 0
    },
)
"""Which GRANITE_EXPERTS reads."""
GRANITE_POSITIONS = write_only(lambda model: {"rope.scaling.finetuned": model.rope_layers is None})
"""A switch of rotary embeddings, which GRANITE_LAYERS reads."""
