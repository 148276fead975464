"""Command R, R+, R7B and A, and those with experts (Command A+, North Mini).

Sources: llama.cpp's src/models/command-r.cpp, cohere2.cpp and cohere2moe.cpp, and conversion/command_r.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.model.model_shape import ModelShape

_ROWS = [*rows.outside_layers(), *rows.in_layers({"input_layernorm": "attn_norm"}), *rows.ATTENTION, *rows.MLP]
_LOGIT_SCALE = keys.number("logit_multiplier", "logit_scale")
_COMPUTED: Mapping[str, Any] = {
    "kv_channels": keys.hidden_by_heads,
    "normalization": "LayerNorm",
    "norm_bias": False,
    **dict.fromkeys(("tied_embeddings", "parallel_residual", "shared_layernorm", "rotary_interleaved"), True),
}

# with experts


def _read_norm(file: Described) -> Fields:
    """Root-mean-square norms where their epsilon is said, and not 0."""
    said = file.number("attention.layer_norm_epsilon", None)
    if epsilon := file.number("attention.layer_norm_rms_epsilon", 0.0):
        return {"normalization": "RMSNorm", "norm_epsilon": epsilon}
    return {"normalization": "LayerNorm", "norm_epsilon": said}


def _read_shared(file: Described) -> Fields:
    each, size = file.count("expert_feed_forward_length"), file.count("expert_shared_count", 0)
    return {"moe.shared_ffn_hidden_size": file.count("expert_shared_feed_forward_length", each * size) or None}


def _write_shared(model: ModelShape) -> keys.Said:
    shared = keys.value_of(model, "moe.shared_ffn_hidden_size")
    return {**expert_keys.SHARED_COUNT.write(model), "expert_shared_feed_forward_length": shared} if shared else {}


def _in_window_or_dense(fields: Fields) -> tuple[bool, ...]:
    """Layers with rotary embeddings."""
    layers = fields["num_layers"]
    windows, experts = (fields.get(name) or (True,) * layers for name in ("window_layers", "moe.layer_freq"))
    pairs = zip(windows, experts, strict=False)  # ModelShape counts them
    return tuple(window or not sparse for window, sparse in pairs)


_NORM = keys.GgufEntry(
    ("normalization", "norm_epsilon"),
    (*keys.LAYER_NORM_EPSILON.keys, *keys.EPSILON.keys),
    _read_norm,
    lambda model: (keys.LAYER_NORM_EPSILON if model.layer_norms else keys.EPSILON).write(model),
)
_SCORES = replace(
    expert_keys.scored_by("sigmoid"),
    read=lambda file: {
        "moe.score_function": "softmax" if expert_keys.is_scored_by("softmax", file) else "sigmoid",
    },
    write=lambda model: expert_keys.scored_by(keys.value_of(model, "moe.score_function")).write(model),
)
_SHARED = keys.GgufEntry(
    expert_keys.SHARED_COUNT.fields,
    (*expert_keys.SHARED_COUNT.keys, *expert_keys.SHARED_EXPERT_SIZE.keys),
    _read_shared,
    _write_shared,
)
_NORMALISED = replace(
    expert_keys.NORMALISED, write=lambda model: {"expert_weights_norm": not keys.value_of(model, "moe.pre_softmax")}
)

FAMILIES = {
    "cohere": GgufFamily(
        "command-r",
        rows=_ROWS,
        keys=base_keys(epsilon=keys.LAYER_NORM_EPSILON, head_size=keys.UNUSUAL_HEAD_SIZE),
        more=(_LOGIT_SCALE, rope_keys.SAYS_UNSCALED),
        computed=_COMPUTED,
        scalings=rope_keys.UNSCALED_ALONE,
    ),
    "cohere2": GgufFamily(
        "cohere2",
        rows=_ROWS,
        keys=base_keys(epsilon=keys.LAYER_NORM_EPSILON),
        more=(_LOGIT_SCALE, keys.WINDOW, keys.VOCABULARY, rope_keys.TURNED, rope_keys.SAYS_UNSCALED),
        computed={**_COMPUTED, "rope_layers": keys.every(4), "window_layers": keys.every(4)},
        scalings=rope_keys.UNSCALED_ALONE,
        scaled=rows.SCALED,
    ),
    "cohere2_moe": GgufFamily(
        "cohere2moe",
        rows=[*_ROWS, *rows.ROUTER, *rows.EXPERTS, *rows.SHARED_EXPERTS],
        keys=base_keys(*expert_keys.EXPERT_COUNTS, _SCORES, epsilon=_NORM),
        more=(
            _LOGIT_SCALE,
            keys.WINDOW,
            keys.WINDOWS,
            keys.VOCABULARY,
            expert_keys.EXPERT_SIZE,
            expert_keys.LEADING_DENSE,
            _NORMALISED,
            _SHARED,
            rope_keys.TURNED,
            rope_keys.SAYS_UNSCALED,
        ),
        computed={
            "norm_bias": False,
            **dict.fromkeys(("parallel_residual", "shared_layernorm", "rotary_interleaved"), True),
            "rope_layers": _in_window_or_dense,
            "moe.shared_average": lambda fields: bool(fields["moe.shared_ffn_hidden_size"]),
        },
        scalings=rope_keys.UNSCALED_ALONE,
    ),
}
