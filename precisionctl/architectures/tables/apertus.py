"""Apertus: norms of queries and keys, an MLP without a gate whose xIELU has two parameters in each layer.

Trap: two numbers of xIELU that nothing changes are stored beside them.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, Row, renamed
from precisionctl.architectures.rearrangements import SAME, SCALAR
from precisionctl.architectures.rope import LLAMA3, rope
from precisionctl.architectures.shared import llama_rows as llama

_ROPE = {"rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, **LLAMA3}

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
    rows=llama.model_rows(
        *renamed(llama.ATTENTION_NORM, {"input_layernorm": "attention_layernorm"}),
        *llama.ATTENTION,
        *renamed(llama.MLP_NORM, {"post_attention_layernorm": "feedforward_layernorm"}),
        *llama.UNGATED_MLP,
        *_XIELU,
    ),
    config=(
        *keys.SIZES,
        keys.HEADS,
        keys.ATTENTION_BIAS,
        keys.always("qk_layernorm", True),
        keys.only("hidden_act", "xielu", "activation", "xielu"),
        keys.always("gated_linear_unit", False),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(12000000.0, scaling=_ROPE),
        keys.tied(False),
    ),
    names_by="this project",
)
