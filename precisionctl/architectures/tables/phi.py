"""Phi-1, 1.5 and 2: attention and MLP read one LayerNorm and are added together; biases everywhere, the head too.

Trap: half of each head's channels are rotated.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama

ARCHITECTURE = Architecture(
    model_types={"phi": "PhiForCausalLM"},
    rows=(
        *llama.EMBEDDING,
        *llama.SEPARATE_LAYER_NORM,
        *renamed(llama.ATTENTION, {"o_proj": "dense"}),
        *renamed(llama.UNGATED_MLP, {"up_proj": "fc1", "down_proj": "fc2"}),
        *renamed(llama.FINAL_LAYER_NORM, {"model.norm": "model.final_layernorm"}),
        *llama.OUTPUT,
        *llama.OUTPUT_BIAS,
    ),
    config=(
        *keys.SIZES,
        keys.HEADS,
        keys.only("qk_layernorm", False),
        *keys.ALL_BIASES,
        keys.always("output_bias", True),
        keys.activation("hidden_act", {"gelu_new": "gelu_tanh", **keys.GELU_TANH, "gelu": "gelu"}, "gelu_new"),
        keys.always("gated_linear_unit", False),
        keys.always("normalization", "LayerNorm"),
        keys.always("parallel_residual", True),
        keys.always("shared_layernorm", True),
        keys.Key("norm_epsilon", "layer_norm_eps", 1e-5),
        rope(percent=0.5, partial=True),
        keys.tied(False),
    ),
    names_by="this project",
)
