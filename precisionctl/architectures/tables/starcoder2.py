"""StarCoder2: LayerNorm, an MLP without a gate, biases everywhere.

Trap: one switch for all biases.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import everywhere, sliding_window
from precisionctl.architectures.param_map import Architecture, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama

ARCHITECTURE = Architecture(
    model_types={"starcoder2": "Starcoder2ForCausalLM"},
    rows=llama.model_rows(
        *llama.ATTENTION_NORM,
        *llama.ATTENTION,
        *llama.MLP_NORM,
        *renamed(llama.UNGATED_MLP, {"up_proj": "c_fc", "down_proj": "c_proj"}),
        ending=(*llama.FINAL_NORM, *llama.NORM_BIASES),
    ),
    config=(
        *keys.SIZES,
        keys.heads(num_key_value_heads=2),
        keys.biases("use_bias", True),
        keys.activation("hidden_act", {**keys.GELU_TANH, "gelu": "gelu"}, "gelu_pytorch_tanh"),
        keys.always("gated_linear_unit", False),
        keys.always("normalization", "LayerNorm"),
        keys.Key("norm_epsilon", "norm_epsilon", 1e-5),
        rope(),
        sliding_window(everywhere, listed=False),
        keys.tied(True),
    ),
)
