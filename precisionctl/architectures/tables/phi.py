"""Phi-1, 1.5 and 2: attention and MLP read one LayerNorm and are added together; biases everywhere, the head too.

Trap: half of each head's channels are rotated.
"""

from precisionctl.architectures.config_keys import GELU_TANH, HEADS, SIZES, Always, Key, Only, activation, tied
from precisionctl.architectures.param_map import Architecture, Row, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    FINAL_NORM_BIAS,
    OUTPUT,
    OUTPUT_BIAS,
    ROTARY,
    SEPARATE_NORM,
    TIED,
    UNGATED_MLP,
)

ARCHITECTURE = Architecture(
    model_types={"phi": "PhiForCausalLM"},
    rows=(
        *EMBEDDING,
        *SEPARATE_NORM,
        Row(
            "model.layers.{layer}.input_layernorm.bias",
            "decoder.layers.{layer}.input_layernorm.bias",
            ("hidden_size",),
        ),
        *renamed(ATTENTION, {"o_proj": "dense"}),
        *renamed(UNGATED_MLP, {"up_proj": "fc1", "down_proj": "fc2"}),
        *renamed((*FINAL_NORM, *FINAL_NORM_BIAS), {"model.norm": "model.final_layernorm"}),
        *OUTPUT,
        *OUTPUT_BIAS,
    ),
    config=(
        *SIZES,
        HEADS,
        Only("qk_layernorm", False),
        *(Always(bias, True) for bias in ("qkv_bias", "proj_bias", "mlp_bias", "output_bias")),
        activation("hidden_act", {"gelu_new": "gelu_tanh", **GELU_TANH, "gelu": "gelu"}, "gelu_new"),
        Always("gated_linear_unit", False),
        Always("normalization", "LayerNorm"),
        Always("parallel_residual", True),
        Always("shared_layernorm", True),
        Key("norm_epsilon", "layer_norm_eps", 1e-5),
        rope(percent=0.5, partial=True),
        tied(False),
    ),
    aliases=(TIED,),
    derived=ROTARY,
    names_by="this project",
)
