"""Cohere's Command A and R7B: Command R with a window in three layers of four, and no rotary embeddings in the others.

Trap: without a window at all, no layer has rotary embeddings.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import all_but_every, layers_in_window, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.tables.cohere import COMMON, LAYER_NORM, ROWS

_LOCAL = all_but_every(4, "sliding_window_pattern")


def _read_rope_layers(config: keys.Config) -> keys.Fields:
    if config.get("sliding_window", 4096) is None:
        return {"rope_layers": (False,) * keys.layers(config)}
    return {"rope_layers": tuple(layers_in_window(config, _LOCAL))}


ARCHITECTURE = Architecture(
    model_types={"cohere2": "Cohere2ForCausalLM"},
    rows=ROWS,
    config=(
        *COMMON,
        keys.HEADS,
        *LAYER_NORM,
        rope(),
        sliding_window(_LOCAL, absent=4096, null_is_none=True, also=("sliding_window_pattern",)),
        keys.Rule(("sliding_window", "layer_types", "sliding_window_pattern"), _read_rope_layers),
    ),
    names_by="this project",
)
