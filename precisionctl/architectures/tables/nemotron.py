"""Nemotron (Nemotron-4, Minitron): squared ReLU without a gate, LayerNorm, half of each head's channels rotated.

Trap: norms store their factor less one, in Hugging Face as in Megatron (`--apply-layernorm-1p`).
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama

ARCHITECTURE = Architecture(
    model_types={"nemotron": "NemotronForCausalLM"},
    rows=llama.model_rows(
        *(*llama.ATTENTION_LAYER_NORM, *llama.ATTENTION, *llama.MLP_LAYER_NORM, *llama.UNGATED_MLP),
        ending=llama.FINAL_LAYER_NORM,
    ),
    config=(
        *keys.SIZES,
        keys.HEADS,
        keys.ATTENTION_BIAS,
        keys.Key("mlp_bias", "mlp_bias", False),
        keys.only("hidden_act", "relu2", "activation", "squared_relu"),
        keys.always("gated_linear_unit", False),
        keys.always("normalization", "LayerNorm"),
        keys.always("zero_centered_gamma", True),
        keys.always("hf_zero_centered_gamma", True),
        keys.Key("norm_epsilon", "norm_eps", 1e-5),
        rope(percent=0.5, partial=True),
        keys.tied(False),
    ),
)
