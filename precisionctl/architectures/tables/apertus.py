"""Apertus: norms of queries and keys, an MLP without a gate whose xIELU has two parameters in each layer.

Trap: two numbers of xIELU that nothing changes are stored beside them.
"""

from precisionctl.architectures.config_keys import ATTENTION_BIAS, HEADS, SIZES, Always, Key, Only, tied
from precisionctl.architectures.param_map import Architecture, Row, renamed
from precisionctl.architectures.rearrangements import SAME, SCALAR
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION,
    ATTENTION_NORM,
    MLP_NORM,
    UNGATED_MLP,
    model_rows,
)

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

_XIELU = tuple(
    Row(
        f"model.layers.{{layer}}.mlp.act_fn.{name}",
        f"decoder.layers.{{layer}}.mlp.activation_func.{name}",
        (1,),
        SAME if name.startswith("alpha") else SCALAR,
    )
    for name in ("alpha_p", "alpha_n", "beta", "eps")
)

ARCHITECTURE = Architecture(
    model_types={"apertus": "ApertusForCausalLM"},
    rows=model_rows(
        *renamed(ATTENTION_NORM, {"input_layernorm": "attention_layernorm"}),
        *ATTENTION,
        *renamed(MLP_NORM, {"post_attention_layernorm": "feedforward_layernorm"}),
        *UNGATED_MLP,
        *_XIELU,
    ),
    config=(
        *SIZES,
        HEADS,
        ATTENTION_BIAS,
        Always("qk_layernorm", True),
        Only("hidden_act", "xielu", "activation", "xielu"),
        Always("gated_linear_unit", False),
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(12000000.0, scaling=_LLAMA3),
        tied(False),
    ),
    names_by="this project",
)
