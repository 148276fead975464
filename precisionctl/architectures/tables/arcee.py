"""Arcee (AFM): Llama whose MLP is a squared ReLU without a gate."""

from precisionctl.architectures.config_keys import ATTENTION_BIAS, HEADS, SIZES, Always, Key, Only, tied
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION,
    ATTENTION_NORM,
    MLP_NORM,
    UNGATED_MLP,
    model_rows,
)

ARCHITECTURE = Architecture(
    model_types={"arcee": "ArceeForCausalLM"},
    rows=model_rows(*ATTENTION_NORM, *ATTENTION, *MLP_NORM, *UNGATED_MLP),
    config=(
        *SIZES,
        HEADS,
        ATTENTION_BIAS,
        Key("mlp_bias", "mlp_bias", False),
        Only("hidden_act", "relu2", "activation", "squared_relu"),
        Always("gated_linear_unit", False),
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(),
        tied(False),
    ),
)
