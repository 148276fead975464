"""StarCoder2: LayerNorm, an MLP without a gate, biases everywhere.

Trap: one switch for all biases.
"""

from precisionctl.architectures.config_keys import GELU_TANH, SIZES, Always, Key, activation, biases, heads, tied
from precisionctl.architectures.config_layers import everywhere, sliding_window
from precisionctl.architectures.param_map import Architecture, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION,
    ATTENTION_NORM,
    FINAL_NORM,
    MLP_NORM,
    NORM_BIASES,
    UNGATED_MLP,
    model_rows,
)

ARCHITECTURE = Architecture(
    model_types={"starcoder2": "Starcoder2ForCausalLM"},
    rows=model_rows(
        *ATTENTION_NORM,
        *ATTENTION,
        *MLP_NORM,
        *renamed(UNGATED_MLP, {"up_proj": "c_fc", "down_proj": "c_proj"}),
        ending=(*FINAL_NORM, *NORM_BIASES),
    ),
    config=(
        *SIZES,
        heads(num_key_value_heads=2),
        biases("use_bias", True),
        activation("hidden_act", {**GELU_TANH, "gelu": "gelu"}, "gelu_pytorch_tanh"),
        Always("gated_linear_unit", False),
        Always("normalization", "LayerNorm"),
        Key("norm_epsilon", "norm_epsilon", 1e-5),
        rope(),
        sliding_window(everywhere, listed=False),
        tied(True),
    ),
)
