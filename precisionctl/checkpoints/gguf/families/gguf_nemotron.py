"""Nemotron (Nemotron-4, Minitron) and Jais 2: layer norms, and an MLP of squared ReLUs without a gate.

Sources: llama.cpp's src/models/nemotron.cpp and jais2.cpp, and conversion/nemotron.py and jais.py.
"""

from collections.abc import Mapping
from typing import Any

from precisionctl.checkpoints.gguf import metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.tensor_changes import PLUS_ONE

_NORM_BIASES = [rows.FINAL_NORM_BIAS, *rows.in_layers(rows.NORMS, ends=("bias",))]
_COMPUTED: Mapping[str, Any] = {
    "normalization": "LayerNorm",
    "activation": "squared_relu",
    "gated_linear_unit": False,
}

FAMILIES = {
    "nemotron": GgufFamily(
        "nemotron",
        rows=[
            *rows.outside_layers(PLUS_ONE),
            *rows.in_layers(rows.NORMS, PLUS_ONE),
            *_NORM_BIASES,
            *rows.ATTENTION,
            *rows.UNGATED_MLP,
        ],
        keys=base_keys(),
        more=(
            *(keys.VOCABULARY, keys.LAYER_NORM_EPSILON, rope_keys.TURNED, keys.ATTENTION_BIAS, keys.MLP_BIAS),
            rope_keys.SAYS_UNSCALED,
        ),
        computed={
            **_COMPUTED,
            "kv_channels": keys.hidden_by_heads,
            "tied_embeddings": False,
            "hf_zero_centered_gamma": True,
        },
        scalings=rope_keys.UNSCALED_ALONE,
    ),
    "jais2": GgufFamily(
        "jais2",
        rows=[*rows.DECODER, *_NORM_BIASES, *rows.UNGATED_MLP],
        keys=base_keys(epsilon=keys.LAYER_NORM_EPSILON),
        more=(rope_keys.TURNED, keys.QKV_BIAS),
        computed={**_COMPUTED, "proj_bias": True, "mlp_bias": True},
    ),
}
