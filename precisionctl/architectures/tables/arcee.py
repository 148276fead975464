"""Arcee (AFM): Llama whose MLP is a squared ReLU without a gate."""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama

ARCHITECTURE = Architecture(
    model_types={"arcee": "ArceeForCausalLM"},
    rows=llama.model_rows(*llama.ATTENTION_NORM, *llama.ATTENTION, *llama.MLP_NORM, *llama.UNGATED_MLP),
    config=(
        *keys.SIZES,
        keys.HEADS,
        keys.ATTENTION_BIAS,
        keys.Key("mlp_bias", "mlp_bias", False),
        keys.only("hidden_act", "relu2", "activation", "squared_relu"),
        keys.always("gated_linear_unit", False),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(),
        keys.tied(False),
    ),
)
