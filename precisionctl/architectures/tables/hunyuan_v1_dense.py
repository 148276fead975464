"""Hunyuan (dense): Llama whose queries and keys are normalised after their rotary embedding.

Trap: a `dynamic` scaling with `alpha` is none: it stretches the base, whatever the length.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, renamed
from precisionctl.architectures.rope import rope, rope_type, rotary_parameters
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.model.model_parts import real

_ROPE = rope()


def _read_rope(config: keys.Config) -> keys.Fields:
    parameters = rotary_parameters(config, 10000.0)
    if rope_type(parameters) != "dynamic" or not parameters.get("alpha"):
        return _ROPE.read(config)
    unscaled = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
    fields = _ROPE.read({**config, "rope_parameters": unscaled, "rope_scaling": None})
    head, alpha = keys.size(config, "head_dim"), real(parameters["alpha"], "alpha")
    return {**fields, "rotary_base": fields["rotary_base"] * alpha ** (head / (head - 2))}


ROPE = keys.Rule(_ROPE.keys, _read_rope, _ROPE.write)

ATTENTION = renamed(llama.ATTENTION, {"q_norm": "query_layernorm", "k_norm": "key_layernorm"})

ARCHITECTURE = Architecture(
    model_types={"hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM"},
    rows=llama.model_rows(*llama.ATTENTION_NORM, *ATTENTION, *llama.MLP_NORM, *llama.MLP),
    config=llama_keys(
        keys.always("qk_layernorm", True),
        keys.always("qk_layernorm_after_rope", True),
        attention_bias=True,
        epsilon=1e-5,
        rotary=ROPE,
    ),
)
