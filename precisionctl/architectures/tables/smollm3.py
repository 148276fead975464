"""SmolLM3: Llama without rotary embeddings in every fourth layer.

Traps: `no_rope_layers` has a 1 for each layer that has them; `use_sliding_window` counts only where no `layer_types`
say which layers have the window.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import listed_flags, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA


def with_rope(config: keys.Config) -> tuple[bool, ...]:
    """Whether each layer has rotary embeddings."""
    listed = config.get("no_rope_layers")
    if listed is None:
        every = keys.size(config, "no_rope_layer_interval", absent=4)
        return tuple((layer + 1) % every != 0 for layer in range(keys.layers(config)))
    return tuple(listed_flags(listed, "no_rope_layers", keys.layers(config)))


_SWITCH = "use_sliding_window"


def _without_rope(config: keys.Config, layers: int) -> list[bool]:
    return [keys.is_on(config, _SWITCH) and not each for each in with_rope(config)]


_ROPE_KEYS = ("no_rope_layers", "no_rope_layer_interval")

ROPE_LAYERS = keys.Rule(
    _ROPE_KEYS,
    lambda config: {"rope_layers": with_rope(config)},
    lambda model: {"no_rope_layers": [int(each) for each in model.rope_layers or (True,) * model.num_layers]},
)

ARCHITECTURE = Architecture(
    model_types={"smollm3": "SmolLM3ForCausalLM"},
    rows=LLAMA.rows,
    config=llama_keys(
        keys.Key("mlp_bias", "mlp_bias", False),
        heads=keys.heads(num_key_value_heads=4),
        attention_bias=True,
        rotary=rope(2000000.0),
        after_rotary=(
            ROPE_LAYERS,
            sliding_window(_without_rope, also=_ROPE_KEYS),
            keys.Rule((_SWITCH,), write=lambda model: {} if model.sliding_window is None else {_SWITCH: True}),
        ),
        tied=True,
    ),
)
