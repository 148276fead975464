"""Cohere's Command R: attention and MLP read one norm and are added together.

Traps: norms are LayerNorms without biases; rotary channels are neighbouring pairs; logits are scaled.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, Condition, Row
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama

_BIAS = Condition("norm_bias", ("layer_norms",))

NORM = (
    *llama.SEPARATE_NORM,
    Row(
        "model.layers.{layer}.input_layernorm.bias",
        "decoder.layers.{layer}.input_layernorm.bias",
        ("hidden_size",),
        present=_BIAS,
    ),
)
LAST_NORM = (*llama.FINAL_NORM, Row("model.norm.bias", "decoder.final_layernorm.bias", ("hidden_size",), present=_BIAS))

ROWS = llama.model_rows(*NORM, *llama.ATTENTION, *llama.MLP, ending=LAST_NORM)

BLOCKS: tuple[keys.Entry, ...] = (
    *keys.SIZES,
    keys.ATTENTION_BIAS,
    keys.SILU,
    keys.always("norm_bias", False),
    keys.always("parallel_residual", True),
    keys.always("shared_layernorm", True),
)
COMMON: tuple[keys.Entry, ...] = (
    *BLOCKS,
    keys.always("rotary_interleaved", True),
    keys.Key("logit_multiplier", "logit_scale", 0.0625),
    keys.tied(True),
)
LAYER_NORM: tuple[keys.Entry, ...] = (
    keys.always("normalization", "LayerNorm"),
    keys.Key("norm_epsilon", "layer_norm_eps", 1e-5),
)

ARCHITECTURE = Architecture(
    model_types={"cohere": "CohereForCausalLM"},
    rows=ROWS,
    config=(*COMMON, keys.HEADS, *LAYER_NORM, keys.only("use_qk_norm", False), rope(500000.0)),
    names_by="this project",
)
