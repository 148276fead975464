"""Nemotron (Nemotron-4, Minitron) and Jais 2: layer norms, and an MLP of squared ReLUs without a gate.

Sources: llama.cpp's src/models/nemotron.cpp and jais2.cpp, and conversion/nemotron.py and jais.py.
"""

from collections.abc import Mapping
from typing import Any

from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata_keys import (
    ATTENTION_BIAS,
    HEAD_SIZE,
    LAYER_NORM_EPSILON,
    MLP_BIAS,
    QKV_BIAS,
    VOCABULARY,
    hidden_by_heads,
)
from precisionctl.checkpoints.gguf.rope_keys import SAYS_UNSCALED, TURNED, UNSCALED_ALONE
from precisionctl.checkpoints.gguf.tensor_rows import (
    ATTENTION,
    DECODER,
    FINAL_NORM_BIAS,
    NORMS,
    UNGATED_MLP,
    in_layers,
    outside_layers,
)
from precisionctl.checkpoints.tensor_changes import PLUS_ONE

_NORM_BIASES = [FINAL_NORM_BIAS, *in_layers(NORMS, ends=("bias",))]
_COMPUTED: Mapping[str, Any] = {
    "normalization": "LayerNorm",
    "activation": "squared_relu",
    "gated_linear_unit": False,
}

FAMILIES = {
    "nemotron": GgufFamily(
        "nemotron",
        rows=[
            *outside_layers(PLUS_ONE),
            *in_layers(NORMS, PLUS_ONE),
            *_NORM_BIASES,
            *ATTENTION,
            *UNGATED_MLP,
        ],
        keys=(*base_keys(), HEAD_SIZE),
        more=(
            *(VOCABULARY, LAYER_NORM_EPSILON, TURNED, ATTENTION_BIAS, MLP_BIAS),
            SAYS_UNSCALED,
        ),
        reads=(),
        computed={
            **_COMPUTED,
            "kv_channels": hidden_by_heads,
            "tied_embeddings": False,
            "hf_zero_centered_gamma": True,
        },
        scalings=UNSCALED_ALONE,
    ),
    "jais2": GgufFamily(
        "jais2",
        rows=[*DECODER, *_NORM_BIASES, *UNGATED_MLP],
        keys=(*base_keys(epsilon=LAYER_NORM_EPSILON), HEAD_SIZE),
        more=(TURNED, QKV_BIAS),
        reads=(),
        computed={**_COMPUTED, "proj_bias": True, "mlp_bias": True},
    ),
}
"""By the `model_type` of the text model."""
