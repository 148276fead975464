"""Nemotron (Nemotron-4, Minitron): squared ReLU without a gate, LayerNorm, half of each head's channels rotated.

Trap: norms store their factor less one, in Hugging Face as in Megatron (`--apply-layernorm-1p`).
"""

from precisionctl.architectures.config_keys import ATTENTION_BIAS, HEADS, SIZES, Always, Key, Only, tied
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION,
    ATTENTION_LAYER_NORM,
    FINAL_LAYER_NORM,
    MLP_LAYER_NORM,
    UNGATED_MLP,
    model_rows,
)

ARCHITECTURE = Architecture(
    model_types={"nemotron": "NemotronForCausalLM"},
    rows=model_rows(
        *(*ATTENTION_LAYER_NORM, *ATTENTION, *MLP_LAYER_NORM, *UNGATED_MLP),
        ending=FINAL_LAYER_NORM,
    ),
    config=(
        *SIZES,
        HEADS,
        ATTENTION_BIAS,
        Key("mlp_bias", "mlp_bias", False),
        Only("hidden_act", "relu2", "activation", "squared_relu"),
        Always("gated_linear_unit", False),
        Always("normalization", "LayerNorm"),
        Always("zero_centered_gamma", True),
        Always("hf_zero_centered_gamma", True),
        Key("norm_epsilon", "norm_eps", 1e-5),
        rope(percent=0.5, partial=True),
        tied(False),
    ),
)
