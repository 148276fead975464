"""EXAONE 4: norms after attention and MLP and none before them, a norm of each head's query and key; with a window, in
three layers of four, the others have no rotary embeddings.

Trap: without a window, all layers have rotary embeddings.
"""

from precisionctl.architectures.config_keys import SILU, SIZES, Always, Config, Entry, Fields, Key, Rule, heads, tied
from precisionctl.architectures.config_layers import Local, all_but_every, layer_types, layers_in_window, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.gemma_rows import POST_ATTENTION_NORM, POST_MLP_NORM
from precisionctl.architectures.shared.llama_rows import ATTENTION, MLP, model_rows
from precisionctl.model.model_shape import ModelShape


def windows(local: Local, absent: int, also: tuple[str, ...] = ()) -> tuple[Entry, ...]:
    """Layers with a window and rotary embeddings, and layers with neither: arguments as `sliding_window` has them."""

    def read(config: Config) -> Fields:
        if config.get("sliding_window", absent) is None:
            return {}
        return {"rope_layers": tuple(layers_in_window(config, local))}

    def write(model: ModelShape) -> Config:
        """Where there is no window too: its class cannot be without a list then."""
        return {"layer_types": layer_types(model)}

    keys = ("sliding_window", "layer_types", *also)
    return (sliding_window(local, absent=absent, also=also), Rule(keys, read, write))


_PATTERN = "sliding_window_pattern"
WINDOWS = windows(all_but_every(4, _PATTERN), absent=4096, also=(_PATTERN,))

ARCHITECTURE = Architecture(
    model_types={"exaone4": "Exaone4ForCausalLM"},
    rows=model_rows(*ATTENTION, *POST_ATTENTION_NORM, *MLP, *POST_MLP_NORM),
    config=(
        *SIZES,
        heads(num_key_value_heads=32),
        SILU,
        Always("qk_layernorm", True),
        Always("pre_layernorms", False),
        Always("post_layernorms", True),
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(),
        *WINDOWS,
        tied(False),
    ),
    names_by="Megatron-Bridge",
)
