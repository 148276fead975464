"""OLMo (the first): Llama with LayerNorms without weights and biases; queries, keys and values may be clamped.

Trap: Megatron's LayerNorms have both. Their weights are stored less one, so that both are zeros, which nothing trains.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import ATTENTION_BIAS, HEADS, SILU, SIZES, Always, Key, tied
from precisionctl.architectures.param_map import Architecture, Condition
from precisionctl.architectures.rearrangements import SAME
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION,
    ATTENTION_NORM,
    FINAL_NORM,
    MLP,
    MLP_NORM,
    ZERO_NORM_BIASES,
    model_rows,
)

_WEIGHTS = tuple(
    replace(row, rearrangement=SAME, present=Condition("norm_weight", ("layer_norms",)))
    for row in (*ATTENTION_NORM, *MLP_NORM, *FINAL_NORM)
)

ARCHITECTURE = Architecture(
    model_types={"olmo": "OlmoForCausalLM"},
    rows=model_rows(*_WEIGHTS, *ZERO_NORM_BIASES, *ATTENTION, *MLP, ending=()),
    config=(
        *SIZES,
        HEADS,
        ATTENTION_BIAS,
        SILU,
        Always("normalization", "LayerNorm"),
        Always("norm_epsilon", 1e-5),
        Always("norm_weight", False),
        Always("norm_bias", False),
        Always("zero_centered_gamma", True),
        Key("clip_qkv", "clip_qkv", None),
        rope(),
        tied(False),
    ),
)
