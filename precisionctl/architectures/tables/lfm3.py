"""LFM3: LFM2's short convolutions beside attention with a gate of each head, windows with rotary embeddings of their
own, and norms of what blocks give too.

Traps: files call the gate `gate_proj`, and transformers' class `g_proj`. With a gate the norm before attention
is no part of linear_qkv; that before a convolution is always part of in_proj. An MLP has the channels that config.json
says: LFM2's other words for sizes, layers and the tied embedding are passed over. Rotary embeddings that are not scaled
turn whole heads, whatever share config.json says.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import listed_layers, window_fields, write_window
from precisionctl.architectures.param_map import Architecture, Either, only_in, only_with, renamed
from precisionctl.architectures.rope import KEYS, rope_of_kinds, write_rope_of_kinds
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.tables.lfm2 import CONVOLUTION, ENDING, NAMES

_GATE = Either(
    only_in("attention", renamed(llama.LINEAR_GATE, {".g_proj.": ".gate_proj."})),
    in_memory=only_in("attention", llama.LINEAR_GATE),
)

_NAMES = {name: its for name, its in NAMES.items() if ".self_attn." not in name}
"""Those of attention are Llama's."""


_NORMS = (*only_with("fused_input_layernorm", llama.ATTENTION_NORM), *only_with("linear_gate", llama.SEPARATE_NORM))
_BLOCKS = (
    *only_in("conv", CONVOLUTION),
    *only_in("attention", (*_NORMS, *llama.ATTENTION)),
    *llama.MLP_NORM,
    *llama.MLP,
)

_OPERATOR_NORM = renamed(llama.POST_ATTENTION_NORM, {".post_attention_layernorm.": ".post_operator_norm."})
_AFTER = only_with(
    "post_layernorms",
    (
        *only_in("attention", _OPERATOR_NORM),
        *only_in("conv", renamed(_OPERATOR_NORM, {}, {".linear_proj.": ".out_proj."})),
        *renamed(llama.POST_MLP_NORM, {".post_feedforward_layernorm.": ".post_ffn_norm."}),
    ),
)

_ROPE = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

_CONVOLUTIONS = {"conv": True, "full_attention": False, "sliding_attention": False}
_WINDOWS = {"conv": False, "full_attention": False, "sliding_attention": True}


def _read_layers(config: keys.Config) -> keys.Fields:
    convolutions, windows = (listed_layers(config, kinds) for kinds in (_CONVOLUTIONS, _WINDOWS))
    if convolutions is None or windows is None:
        number = keys.layers(config)
        convolutions = [layer == 0 or layer % 2 == 1 for layer in range(number)]
        windows = [layer > 0 and layer % 4 == 0 for layer in range(number)]
    attention = [in_window for in_window, other in zip(windows, convolutions, strict=True) if not other]
    return {
        "short_conv.layers": tuple(convolutions),
        **window_fields(config, windows, 256),
        **(rope_of_kinds(config, attention, _ROPE, 1.0, partial=False) if attention else {}),
    }


ARCHITECTURE = Architecture(
    model_types={"lfm3": "Lfm3ForCausalLM"},
    rows=llama.model_rows(*renamed(_BLOCKS, _NAMES), _GATE, *_AFTER, ending=ENDING),
    config=(
        keys.LAYERS,
        keys.Key("hidden_size", "hidden_size", 2048),
        keys.Key("ffn_hidden_size", "intermediate_size", 7680),
        keys.Key("max_position_embeddings", "max_position_embeddings", 128000),
        keys.VOCABULARY,
        keys.heads(num_attention_heads=16, num_key_value_heads=4, head_dim=128),
        keys.only("attention_bias", False),
        keys.always("qk_layernorm", True),
        keys.Rule(
            ("use_attention_gate",),
            lambda config: {
                "linear_gate": "sigmoid per head" if keys.is_on(config, "use_attention_gate", True) else None
            },
            lambda model: {"use_attention_gate": model.linear_gate is not None},
        ),
        keys.Key("short_conv.kernel_dim", "conv_L_cache", 7),
        keys.only("conv_bias", False),
        keys.Rule(
            ("layer_types", "sliding_window", *KEYS),
            _read_layers,
            lambda model: {**write_window(model), **write_rope_of_kinds(model)},
        ),
        keys.Rule(
            ("use_sandwich_norm",),
            lambda config: {"post_layernorms": keys.is_on(config, "use_sandwich_norm", True)},
            lambda model: {"use_sandwich_norm": model.post_layernorms},
        ),
        keys.Key("norm_epsilon", "norm_eps", 1e-5, synonym="rms_norm_eps"),
        keys.tied(True),
    ),
    names_by="this project",
)
