"""Gemma, Gemma 2 and Gemma 3.

Sources: llama.cpp's src/models/gemma.cpp, gemma2.cpp and gemma3.cpp, and conversion/gemma.py.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf import metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.tensor_changes import PLUS_ONE
from precisionctl.errors import UnknownArchitecture

_DECODER = [*rows.outside_layers(PLUS_ONE), *rows.ATTENTION, *rows.MLP]
_UNUSUAL_ROPE = replace(
    rope_keys.ROPE,
    write=lambda model: {} if (model.rotary_base, model.rope_scaling) == (1e4, None) else rope_keys.ROPE.write(model),
)
"""The converter does not write the base."""
_KEYS = (keys.CONTEXT, keys.WIDTH, keys.LAYERS, keys.MLP_SIZE, keys.HEADS, keys.EPSILON, keys.HEAD_SIZE, _UNUSUAL_ROPE)

COMPUTED: Mapping[str, Any] = {
    "activation": "gelu_tanh",
    "embedding_multiplier": lambda fields: math.sqrt(fields["hidden_size"]),
    "rounded_embedding_multiplier": True,
}
_PLUS_ONE = dict.fromkeys(("zero_centered_gamma", "hf_zero_centered_gamma"), True)
_TIED: Mapping[str, Any] = {**_PLUS_ONE, **COMPUTED, "tied_embeddings": True}
"""Of the first two, whose output layer llama.cpp does not look for."""
FINAL_CAP = keys.number("final_logit_softcapping", "final_logit_softcapping", None)


def _scored_as(layers_of_27b: int) -> Callable[[Fields], float]:
    """The `query_pre_attn_scalar`: in the largest model hidden_size / heads."""

    def scalar(fields: Fields) -> float:
        largest = fields["num_layers"] == layers_of_27b
        found: float = fields["hidden_size"] // fields["num_attention_heads"] if largest else fields["kv_channels"]
        return found

    return scalar


def _read_window_of_gemma3(file: Described) -> Fields:
    if not file.count("attention.sliding_window", 0):
        raise UnknownArchitecture("a Gemma 3 without a window")
    return keys.WINDOW.read(file)


_WINDOW_OF_GEMMA3 = replace(keys.WINDOW, read=_read_window_of_gemma3)


FAMILIES = {
    "gemma": GgufFamily("gemma", rows=[*_DECODER, *rows.in_layers(rows.NORMS, PLUS_ONE)], keys=_KEYS, computed=_TIED),
    "gemma2": GgufFamily(
        "gemma2",
        rows=[*_DECODER, *rows.in_layers(rows.FOUR_NORMS, PLUS_ONE)],
        keys=_KEYS,
        more=(
            keys.number("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
            keys.number("final_logit_softcapping", "final_logit_softcapping", 30.0),
            keys.integer("sliding_window", "attention.sliding_window", 4096),
        ),
        reads=(keys.WINDOWS,),
        computed={
            **_TIED,
            "post_layernorms": True,
            "query_pre_attn_scalar": _scored_as(46),
            "window_layers": keys.every(2),
        },
    ),
    "gemma3_text": GgufFamily(
        "gemma3",
        rows=[*_DECODER, *rows.in_layers({**rows.FOUR_NORMS, **rows.QK_NORMS}, PLUS_ONE)],
        keys=base_keys(rope=(rope_keys.ROPE, rope_keys.LOCAL_BASE)),
        more=(FINAL_CAP, _WINDOW_OF_GEMMA3),
        reads=(keys.WINDOWS,),
        computed={
            **_PLUS_ONE,
            **COMPUTED,
            "post_layernorms": True,
            "qk_layernorm": True,
            "query_pre_attn_scalar": _scored_as(62),
            "window_layers": keys.every(6),
        },
    ),
}
