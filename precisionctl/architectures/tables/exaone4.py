"""EXAONE 4: norms after attention and MLP and none before them, a norm of each head's query and key; with a window, in
three layers of four, the others have no rotary embeddings.

Trap: without a window, all layers have rotary embeddings.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import (
    Local,
    all_but_every,
    layers_in_window,
    sliding_window,
    write_layer_types,
)
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.shared.llama_keys import llama_keys


def windows(local: Local, absent: int, also: tuple[str, ...] = ()) -> tuple[keys.Entry, ...]:
    """Layers with a window and rotary embeddings, and layers with neither: arguments as `sliding_window` has them."""

    def read(config: keys.Config) -> keys.Fields:
        if config.get("sliding_window", absent) is None:
            return {}
        return {"rope_layers": tuple(layers_in_window(config, local))}

    # written where there is no window too: its class cannot be without a list then
    listed = keys.Rule(("sliding_window", "layer_types", *also), read, write_layer_types)
    return sliding_window(local, absent=absent, null_is_none=True, also=also), listed


_PATTERN = "sliding_window_pattern"
WINDOWS = windows(all_but_every(4, _PATTERN), absent=4096, also=(_PATTERN,))

ARCHITECTURE = Architecture(
    model_types={"exaone4": "Exaone4ForCausalLM"},
    rows=llama.model_rows(*llama.ATTENTION, *llama.POST_ATTENTION_NORM, *llama.MLP, *llama.POST_MLP_NORM),
    config=llama_keys(
        keys.always("qk_layernorm", True),
        keys.always("pre_layernorms", False),
        keys.always("post_layernorms", True),
        heads=keys.heads(num_key_value_heads=32),
        epsilon=1e-5,
        after_rotary=WINDOWS,
    ),
    names_by="Megatron-Bridge",
)
