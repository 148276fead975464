"""Nemotron (Nemotron-4, Minitron): squared ReLU without a gate, LayerNorm, half of each head's channels rotated.

Trap: norms store their factor less one, in Hugging Face as in Megatron (`--apply-layernorm-1p`).
"""

from precisionctl.architectures.config_keys import (
    ATTENTION_BIAS,
    HEADS,
    SIZES,
    Always,
    Key,
    Only,
    tied,
)
from precisionctl.architectures.llama_rows import (
    ATTENTION,
    ATTENTION_NORM,
    EMBEDDING,
    FINAL_NORM,
    MLP_NORM,
    OUTPUT,
    ROTARY,
    TIED,
    UNGATED_MLP,
)
from precisionctl.architectures.param_map import Architecture, Row
from precisionctl.architectures.rope import rope

ARCHITECTURE = Architecture(
    model_types={"nemotron": "NemotronForCausalLM"},
    rows=(
        *EMBEDDING,
        *ATTENTION_NORM,
        Row(
            "model.layers.{layer}.input_layernorm.bias",
            "decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_bias",
            ("hidden_size",),
        ),
        *ATTENTION,
        *MLP_NORM,
        Row(
            "model.layers.{layer}.post_attention_layernorm.bias",
            "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_bias",
            ("hidden_size",),
        ),
        *UNGATED_MLP,
        *FINAL_NORM,
        Row("model.norm.bias", "decoder.final_layernorm.bias", ("hidden_size",)),
        *OUTPUT,
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
    aliases=(TIED,),
    derived=ROTARY,
)
