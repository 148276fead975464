"""Hunyuan (dense): Llama whose queries and keys are normalised after their rotary embedding.

Trap: a `dynamic` scaling with `alpha` is none: it stretches the base, whatever the length.
"""

from precisionctl.architectures.config_keys import (
    ATTENTION_BIAS,
    HEADS,
    SILU,
    SIZES,
    Always,
    Config,
    Fields,
    Key,
    Rule,
    size,
    tied,
)
from precisionctl.architectures.param_map import Architecture, renamed
from precisionctl.architectures.rope import rope, rope_type, rotary_parameters
from precisionctl.architectures.shared.llama_rows import ATTENTION as LLAMA_ATTENTION
from precisionctl.architectures.shared.llama_rows import ATTENTION_NORM, MLP, MLP_NORM, model_rows
from precisionctl.model.model_parts import real

_ROPE = rope()


def _read_rope(config: Config) -> Fields:
    parameters = rotary_parameters(config, 10000.0)
    if rope_type(parameters) != "dynamic" or not parameters.get("alpha"):
        return _ROPE.read(config)
    unscaled = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
    fields = _ROPE.read({**config, "rope_parameters": unscaled, "rope_scaling": None})
    head, alpha = size(config, "head_dim"), real(parameters["alpha"], "alpha")
    return {**fields, "rotary_base": fields["rotary_base"] * alpha ** (head / (head - 2))}


ROPE = Rule(_ROPE.keys, _read_rope, _ROPE.write)

ATTENTION = renamed(LLAMA_ATTENTION, {"q_norm": "query_layernorm", "k_norm": "key_layernorm"})

ARCHITECTURE = Architecture(
    model_types={"hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM"},
    rows=model_rows(*ATTENTION_NORM, *ATTENTION, *MLP_NORM, *MLP),
    config=(
        *SIZES,
        HEADS,
        ATTENTION_BIAS,
        SILU,
        Always("qk_layernorm", True),
        Always("qk_layernorm_after_rope", True),
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
        ROPE,
        tied(False),
    ),
)
