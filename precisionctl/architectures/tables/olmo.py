"""OLMo (the first): Llama with LayerNorms without weights and biases; queries, keys and values may be clamped.

Trap: Megatron's LayerNorms have both. Their weights are stored less one, so that both are zeros, which nothing trains.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, Condition
from precisionctl.architectures.rearrangements import SAME
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama

_WEIGHTS = tuple(
    replace(row, rearrangement=SAME, present=Condition("norm_weight", ("layer_norms",)))
    for row in (*llama.ATTENTION_NORM, *llama.MLP_NORM, *llama.FINAL_NORM)
)

ARCHITECTURE = Architecture(
    model_types={"olmo": "OlmoForCausalLM"},
    rows=llama.model_rows(*_WEIGHTS, *llama.ZERO_NORM_BIASES, *llama.ATTENTION, *llama.MLP, ending=()),
    config=(
        *keys.SIZES,
        keys.HEADS,
        keys.ATTENTION_BIAS,
        keys.SILU,
        keys.always("normalization", "LayerNorm"),
        keys.always("norm_epsilon", 1e-5),
        keys.always("norm_weight", False),
        keys.always("norm_bias", False),
        keys.always("zero_centered_gamma", True),
        keys.Key("clip_qkv", "clip_qkv", None),
        rope(),
        keys.tied(False),
    ),
)
