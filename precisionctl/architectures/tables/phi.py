"""Phi-1, 1.5 and 2: attention and MLP read one LayerNorm and are added together; biases everywhere, the head too.

Trap: half of each head's channels are rotated.
"""

from precisionctl.architectures.config_keys import (
    ALL_BIASES,
    GELU_TANH,
    HEADS,
    SIZES,
    Always,
    Key,
    Only,
    activation,
    tied,
)
from precisionctl.architectures.param_map import Architecture, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION,
    EMBEDDING,
    FINAL_LAYER_NORM,
    OUTPUT,
    OUTPUT_BIAS,
    SEPARATE_LAYER_NORM,
    UNGATED_MLP,
)

ARCHITECTURE = Architecture(
    model_types={"phi": "PhiForCausalLM"},
    rows=(
        *EMBEDDING,
        *SEPARATE_LAYER_NORM,
        *renamed(ATTENTION, {"o_proj": "dense"}),
        *renamed(UNGATED_MLP, {"up_proj": "fc1", "down_proj": "fc2"}),
        *renamed(FINAL_LAYER_NORM, {"model.norm": "model.final_layernorm"}),
        *OUTPUT,
        *OUTPUT_BIAS,
    ),
    config=(
        *SIZES,
        HEADS,
        Only("qk_layernorm", False),
        *ALL_BIASES,
        Always("output_bias", True),
        activation("hidden_act", {"gelu_new": "gelu_tanh", **GELU_TANH, "gelu": "gelu"}, "gelu_new"),
        Always("gated_linear_unit", False),
        Always("normalization", "LayerNorm"),
        Always("parallel_residual", True),
        Always("shared_layernorm", True),
        Key("norm_epsilon", "layer_norm_eps", 1e-5),
        rope(percent=0.5, partial=True),
        tied(False),
    ),
    names_by="this project",
)
