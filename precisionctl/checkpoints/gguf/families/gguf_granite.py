"""Granite: models with an MLP, with experts, and Granite 4, most of whose layers have a mixer.

Sources: llama.cpp's src/models/granite.cpp, granite-moe.cpp and granite-hybrid.cpp, and conversion/granite.py.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.families.gguf_mamba2 import MIXER, NO_MIXER, mixer
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.tensor_changes import GATE_THEN_UP
from precisionctl.model.model_parts import real
from precisionctl.model.model_shape import ModelShape

_EXPERTS = [
    *rows.in_layers({"block_sparse_moe.router.layer": "ffn_gate_inp"}),
    rows.GgufRow(
        "model.layers.{layer}.block_sparse_moe.input_linear.weight[{expert}]",
        (rows.stack("ffn_gate_exps"), rows.stack("ffn_up_exps")),
        GATE_THEN_UP,
    ),
    rows.GgufRow(
        "model.layers.{layer}.block_sparse_moe.output_linear.weight[{expert}]", (rows.stack("ffn_down_exps"),)
    ),
]


def _joined(kind: str) -> list[rows.GgufRow]:
    """The MLP, of the kind that ends of names say."""
    return [
        rows.replaced_by("shared_mlp.input_linear", (f"ffn_gate{kind}", f"ffn_up{kind}"), GATE_THEN_UP),
        *rows.in_layers({"shared_mlp.output_linear": f"ffn_down{kind}"}),
    ]


def _read_score_scale(file: Described) -> Fields:
    scale = file.number("attention.scale", None) or keys.head_size(file) ** -0.5
    return {"query_pre_attn_scalar": real(scale, f"{file.architecture}.attention.scale") ** -2}


_SWITCH = keys.expected("rope.scaling.finetuned", True)
"""llama.cpp takes the key for a switch of rotary embeddings."""
_USED, _SHARED = "expert_used_count", "expert_shared_feed_forward_length"
_MULTIPLIERS = (
    keys.VOCABULARY,
    rope_keys.TURNED,
    keys.GgufEntry(
        ("query_pre_attn_scalar",),
        ("attention.scale",),
        _read_score_scale,
        lambda model: {"attention.scale": float((model.query_pre_attn_scalar or model.kv_channels) ** -0.5)},
    ),
    keys.number("embedding_multiplier", "embedding_scale", 1.0),
    keys.number("residual_multiplier", "residual_scale", 1.0),
    keys.number("logits_scaling", "logit_scale"),
)

# Granite 4


def _read_layers(file: Described) -> Fields:
    groups = file.counts(keys.HEADS_KV)
    second = "E" if file.count("expert_count", 0) else "-"
    pattern = "".join(("*" if number else "M") + second for number in groups)
    turned = file.said("rope.scaling.finetuned") is not False
    return {
        "hidden_size": file.count("embedding_length"),
        "ffn_hidden_size": file.count("feed_forward_length"),
        "num_layers": len(pattern),
        "mamba.pattern": pattern,
        **keys.read_some_heads(file, groups),
        "max_position_embeddings": file.count("context_length"),
        "rope_layers": None if turned else (False,) * len(pattern),
    }


def _write_layers(model: ModelShape) -> keys.Said:
    pattern = model.mamba.pattern if model.mamba else ""
    if "M" not in pattern:
        raise keys.refused(model, "without mixers")
    groups = [model.num_query_groups if kind == "*" else 0 for kind in pattern[::2]]
    return {
        "block_count": len(groups),
        "context_length": 1 << 20,
        "embedding_length": model.hidden_size,
        "feed_forward_length": model.ffn_hidden_size,
        "attention.head_count": model.num_attention_heads,
        keys.HEADS_KV: groups,
    }


_LAYERS = keys.GgufEntry(
    (
        *("num_layers", "mamba.pattern", "max_position_embeddings", "hidden_size", "ffn_hidden_size"),
        *("num_attention_heads", "num_query_groups", "rope_layers"),
    ),
    (
        *keys.LAYERS.keys,
        *keys.CONTEXT.keys,
        *keys.WIDTH.keys,
        *keys.MLP_SIZE.keys,
        *keys.HEADS.keys,
        "rope.scaling.finetuned",
    ),
    _read_layers,
    _write_layers,
)
"""A layer of GGUF is two of Megatron's."""
_POSITIONS = keys.write_only(lambda model: {"rope.scaling.finetuned": model.rope_layers is None})
"""A switch of rotary embeddings, which _LAYERS reads."""


_NONE_USED = keys.ignored_keys(_USED, write=lambda model: {_USED: 0})
_MLP_AS_SHARED = keys.ignored_keys(_SHARED, write=lambda model: {_SHARED: model.ffn_hidden_size})
_SHARED_SIZE = keys.integer_or_none("moe.shared_ffn_hidden_size", _SHARED)


def _has_shared(file: Described) -> bool:
    return bool(file.count(_SHARED, 0))


def _write_some_shared(model: ModelShape) -> keys.Said:
    said = _SHARED_SIZE.write(model)
    return said if any(said.values()) else {}


_HYBRID_ROWS = [*rows.DECODER_IN_PAIRS, *mixer("mamba")]
_DENSE = GgufFamily(
    "granitehybrid",
    rows=[*_HYBRID_ROWS, *_joined("")],
    keys=(_LAYERS, rope_keys.ROPE, keys.EPSILON, keys.always("expert_count", 0), _NONE_USED, keys.UNUSUAL_HEAD_SIZE),
    more=(*_MULTIPLIERS, _MLP_AS_SHARED, MIXER, _POSITIONS),
)
_SPARSE = replace(
    _DENSE,
    rows=[*_HYBRID_ROWS, *_joined("_shexp"), *_EXPERTS],
    keys=(_LAYERS, rope_keys.ROPE, keys.EPSILON, *expert_keys.EXPERT_COUNTS, keys.UNUSUAL_HEAD_SIZE),
    more=(*_MULTIPLIERS, _SHARED_SIZE, MIXER, _POSITIONS),
    computed={
        **expert_keys.AS_LARGE_AS_MLP,
        "moe.layer_freq": lambda fields: (False, True) * (fields["num_layers"] // 2),
    },
)

# With windows

_SINKS = rows.in_layer("self_attn.sinks", "attn_sinks.weight")
_PATTERN = "attention.rope_pattern"


def _read_rope_layers(file: Described) -> Fields:
    turned = file.flags(_PATTERN)
    return {"rope_layers": None if not turned or all(turned) else tuple(turned)}


_WINDOWS_AND_ROPE = (
    keys.WINDOW,
    keys.WINDOWS,
    keys.GgufEntry(
        ("rope_layers",),
        (_PATTERN,),
        _read_rope_layers,
        lambda model: {_PATTERN: list(model.rope_layers)} if model.rope_layers else {},
    ),
)
_WINDOWED = GgufFamily(
    "granite_swa",
    rows=[*rows.DECODER_IN_PAIRS, _SINKS, *rows.MLP],
    keys=base_keys(head_size=keys.UNUSUAL_HEAD_SIZE),
    more=(*_MULTIPLIERS, *_WINDOWS_AND_ROPE, keys.ATTENTION_BIAS, keys.MLP_BIAS),
    reads=(keys.NO_EXPERTS,),
    computed={"softmax_offset": True},
    scalings=rope_keys.AND_LLAMA3,
    recognises=lambda file: not file.count("expert_count", 0),
)

FAMILIES = {
    "granite": GgufFamily(
        "granite",
        rows=[*rows.DECODER_IN_PAIRS, *rows.MLP],
        keys=base_keys(head_size=keys.UNUSUAL_HEAD_SIZE),
        more=(*_MULTIPLIERS, keys.ATTENTION_BIAS, keys.MLP_BIAS),
        reads=(_SWITCH, NO_MIXER, keys.NO_EXPERTS, keys.ignored_keys(_USED, _SHARED)),
        scalings=rope_keys.AND_LLAMA3,
    ),
    "granitemoe": GgufFamily(
        "granitemoe",
        rows=[*rows.DECODER_IN_PAIRS, *_EXPERTS],
        keys=base_keys(*expert_keys.EXPERT_COUNTS, head_size=keys.UNUSUAL_HEAD_SIZE),
        more=(*_MULTIPLIERS, keys.ATTENTION_BIAS),
        reads=(_SWITCH, NO_MIXER, keys.expected(_SHARED, 0)),
        computed={**expert_keys.IN_ALL_LAYERS, **expert_keys.AS_LARGE_AS_MLP},
        scalings=rope_keys.AND_LLAMA3,
        recognises=lambda file: not _has_shared(file),
    ),
    "granitemoeshared": GgufFamily(
        "granitemoe",
        rows=[*rows.DECODER_IN_PAIRS, *_EXPERTS, *_joined("_shexp")],
        keys=base_keys(*expert_keys.EXPERT_COUNTS, head_size=keys.UNUSUAL_HEAD_SIZE),
        more=(*_MULTIPLIERS, replace(_SHARED_SIZE, write=_write_some_shared), keys.ATTENTION_BIAS),
        reads=(_SWITCH, NO_MIXER),
        computed={**expert_keys.IN_ALL_LAYERS, **expert_keys.AS_LARGE_AS_MLP},
        scalings=rope_keys.AND_LLAMA3,
        recognises=_has_shared,
    ),
    "granite_swa": _WINDOWED,
    "granitemoe_swa": replace(
        _WINDOWED,
        rows=[
            *rows.DECODER_IN_PAIRS,
            _SINKS,
            *rows.in_layers({"block_sparse_moe.router": "ffn_gate_inp", "shared_mlp.input_linear": "ffn_up_shexp"}),
            *rows.in_layers({"shared_mlp.output_linear": "ffn_down_shexp"}),
            rows.GgufRow(
                "model.layers.{layer}.block_sparse_moe.experts.gate_up_proj[{expert}]",
                (rows.stack("ffn_gate_up_exps"),),
            ),
            rows.GgufRow(
                "model.layers.{layer}.block_sparse_moe.experts.down_proj[{expert}]", (rows.stack("ffn_down_exps"),)
            ),
        ],
        keys=base_keys(*expert_keys.EXPERT_COUNTS, head_size=keys.UNUSUAL_HEAD_SIZE),
        more=(*_MULTIPLIERS, *_WINDOWS_AND_ROPE, replace(_SHARED_SIZE, write=_write_some_shared), keys.ATTENTION_BIAS),
        reads=(),
        computed={**_WINDOWED.computed, **expert_keys.IN_ALL_LAYERS, **expert_keys.AS_LARGE_AS_MLP},
        recognises=lambda file: bool(file.count("expert_count", 0)),
    ),
    "granitemoehybrid": replace(_DENSE, with_experts=_SPARSE),
}
