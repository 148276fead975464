"""Command R, R+, R7B and A.

Sources: llama.cpp's src/models/command-r.cpp and cohere2.cpp, and conversion/command_r.py.
"""

from collections.abc import Mapping
from typing import Any

from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata_keys import (
    HEAD_SIZE,
    LAYER_NORM_EPSILON,
    UNUSUAL_HEAD_SIZE,
    VOCABULARY,
    WINDOW,
    every,
    hidden_by_heads,
    number,
    write_only,
)
from precisionctl.checkpoints.gguf.rope_keys import TURNED, UNSCALED_ALONE
from precisionctl.checkpoints.gguf.tensor_rows import ATTENTION, MLP, SCALED, in_layers, outside_layers

_ROWS = [*outside_layers(), *in_layers({"input_layernorm": "attn_norm"}), *ATTENTION, *MLP]
_LOGIT_SCALE = number("logit_multiplier", "logit_scale")
_UNSCALED = write_only(lambda model: {"rope.scaling.type": "none"})
"""What ROPE reads too."""
_COMPUTED: Mapping[str, Any] = {
    "kv_channels": hidden_by_heads,
    "normalization": "LayerNorm",
    "norm_bias": False,
    **dict.fromkeys(("tied_embeddings", "parallel_residual", "shared_layernorm", "rotary_interleaved"), True),
}

FAMILIES = {
    "cohere": GgufFamily(
        "command-r",
        rows=_ROWS,
        keys=(*base_keys(epsilon=LAYER_NORM_EPSILON), UNUSUAL_HEAD_SIZE),
        more=(_LOGIT_SCALE, _UNSCALED),
        computed=_COMPUTED,
        scalings=UNSCALED_ALONE,
    ),
    "cohere2": GgufFamily(
        "cohere2",
        rows=_ROWS,
        keys=(*base_keys(epsilon=LAYER_NORM_EPSILON), HEAD_SIZE),
        more=(_LOGIT_SCALE, WINDOW, VOCABULARY, TURNED, _UNSCALED),
        reads=(),
        computed={**_COMPUTED, "rope_layers": every(4), "window_layers": every(4)},
        scalings=UNSCALED_ALONE,
        scaled=SCALED,
    ),
}
"""By the `model_type` of the text model."""
