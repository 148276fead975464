"""Cohere's Command R: attention and MLP read one norm and are added together.

Traps: norms are LayerNorms without biases; rotary channels are neighbouring pairs; logits are scaled.
"""

from precisionctl.architectures.config_keys import ATTENTION_BIAS, HEADS, SILU, SIZES, Always, Entry, Key, Only, tied
from precisionctl.architectures.param_map import Architecture, Condition, Row
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION,
    FINAL_NORM,
    MLP,
    SEPARATE_NORM,
    model_rows,
)

_BIAS = Condition("norm_bias", ("layer_norms",))

NORM = (
    *SEPARATE_NORM,
    Row(
        "model.layers.{layer}.input_layernorm.bias",
        "decoder.layers.{layer}.input_layernorm.bias",
        ("hidden_size",),
        present=_BIAS,
    ),
)
LAST_NORM = (*FINAL_NORM, Row("model.norm.bias", "decoder.final_layernorm.bias", ("hidden_size",), present=_BIAS))

ROWS = model_rows(*NORM, *ATTENTION, *MLP, ending=LAST_NORM)

COMMON: tuple[Entry, ...] = (
    *SIZES,
    ATTENTION_BIAS,
    SILU,
    Always("norm_bias", False),
    Always("parallel_residual", True),
    Always("shared_layernorm", True),
    Always("rotary_interleaved", True),
    Key("logit_multiplier", "logit_scale", 0.0625),
    tied(True),
)
LAYER_NORM: tuple[Entry, ...] = (
    Always("normalization", "LayerNorm"),
    Key("norm_epsilon", "layer_norm_eps", 1e-5),
)

ARCHITECTURE = Architecture(
    model_types={"cohere": "CohereForCausalLM"},
    rows=ROWS,
    config=(*COMMON, HEADS, *LAYER_NORM, Only("use_qk_norm", False), rope(500000.0)),
    names_by="this project",
)
