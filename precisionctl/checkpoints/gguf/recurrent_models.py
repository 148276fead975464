"""GGUF's models in whose layers a state passes from token to token (`recurrent_names.py`): what the metadata of each
family say, and what llama.cpp computes whatever they say.

Sources: llama.cpp's src/models/qwen35.cpp, qwen35moe.cpp, lfm2.cpp, lfm2moe.cpp and nemotron-h.cpp, and conversion/*.py
(set_gguf_parameters).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from precisionctl.checkpoints.gguf.gguf_experts import (
    EXPERT_SIZE,
    EXPERTS,
    IN_ALL_LAYERS,
    LEADING_DENSE,
    SHARED_EXPERT_SIZE,
    scored_by,
)
from precisionctl.checkpoints.gguf.gguf_family_keys import DELTA_NET, MULTIPLIERS
from precisionctl.checkpoints.gguf.gguf_keys import (
    EPSILON,
    HEAD_SIZE,
    LAYER_NORM_EPSILON,
    LAYERS_AND_PREDICTION,
    PREDICTION,
    UNUSUAL_HEAD_SIZE,
    VOCABULARY,
    hidden_by_heads,
)
from precisionctl.checkpoints.gguf.gguf_layer_keys import (
    CONVOLUTIONS,
    EXPERTS_OF_MIXERS,
    GRANITE_EXPERTS,
    GRANITE_LAYERS,
    GRANITE_POSITIONS,
    GRANITE_SHARED_SIZE,
    MIXER,
    NO_POSITIONS,
    PATTERN,
    SIZES_OF_EXPERTS_OF_MIXERS,
    TAPS,
)
from precisionctl.checkpoints.gguf.gguf_model import GgufModel, base_keys
from precisionctl.checkpoints.gguf.gguf_rope import ROPE, SECTIONS, TURNED

_WITH_DELTA_NETS: Mapping[str, Any] = {
    **dict.fromkeys(("zero_centered_gamma", "hf_zero_centered_gamma", "qk_layernorm"), True),
    "attention_output_gate": True,
    "gdn.value_head_dim": lambda fields: fields["gdn.key_head_dim"],
}
_QWEN3_5 = GgufModel(
    keys=(*base_keys(layers=LAYERS_AND_PREDICTION, rope=(SECTIONS, ROPE)), HEAD_SIZE),
    more=(PREDICTION, *DELTA_NET, TURNED),
    reads=(),
    computed=_WITH_DELTA_NETS,
)

RECURRENT_MODELS: Mapping[str, GgufModel] = {
    "qwen3_next": GgufModel(
        keys=(*base_keys(*EXPERTS, layers=LAYERS_AND_PREDICTION), HEAD_SIZE),
        more=(EXPERT_SIZE, SHARED_EXPERT_SIZE, PREDICTION, *DELTA_NET, TURNED),
        reads=(),
        computed={**IN_ALL_LAYERS, **_WITH_DELTA_NETS, "moe.shared_expert_gate": True},
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": replace(
        _QWEN3_5,
        keys=(*base_keys(*EXPERTS, layers=LAYERS_AND_PREDICTION, rope=(SECTIONS, ROPE), mlp=()), HEAD_SIZE),
        more=(EXPERT_SIZE, SHARED_EXPERT_SIZE, *_QWEN3_5.more),
        computed={
            **IN_ALL_LAYERS,
            **_QWEN3_5.computed,
            "moe.shared_expert_gate": True,
            "ffn_hidden_size": lambda fields: fields["moe.ffn_hidden_size"],
        },
    ),
    "lfm2": GgufModel(
        keys=(*base_keys(heads=CONVOLUTIONS), UNUSUAL_HEAD_SIZE),
        more=(VOCABULARY, TAPS),
        computed={"kv_channels": hidden_by_heads, "qk_layernorm": True},
    ),
    "lfm2_moe": GgufModel(
        keys=(*base_keys(*EXPERTS, heads=CONVOLUTIONS), UNUSUAL_HEAD_SIZE),
        more=(EXPERT_SIZE, LEADING_DENSE, scored_by("sigmoid"), VOCABULARY, TAPS),
        computed={"kv_channels": hidden_by_heads, "qk_layernorm": True, "moe.expert_bias": True},
    ),
    "nemotron_h": GgufModel(
        keys=(PATTERN, LAYER_NORM_EPSILON, EXPERTS_OF_MIXERS),
        more=(VOCABULARY, TURNED, MIXER, NO_POSITIONS, HEAD_SIZE, SIZES_OF_EXPERTS_OF_MIXERS),
        reads=(),
        computed={
            "activation": "squared_relu",
            "gated_linear_unit": False,
            "rope_layers": lambda fields: (False,) * fields["num_layers"],
        },
        ignored=("mtp_num_layers",),
    ),
    "granitemoehybrid": GgufModel(
        keys=(GRANITE_LAYERS, ROPE, EPSILON, GRANITE_EXPERTS, UNUSUAL_HEAD_SIZE),
        more=(*MULTIPLIERS, GRANITE_SHARED_SIZE, MIXER, GRANITE_POSITIONS),
        reads=(),
    ),
}
"""By the `model_type` of the text model."""
