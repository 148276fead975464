"""Mamba-2: mixers alone, each a layer of Megatron's hybrid stack with the norm before it.

Traps: `num_heads` and `head_dim` are the mixers'; nothing says how long a text may be, and any length is computed.
Megatron asks for heads of attention and an MLP's channels all the same: these are the mixers', and no layer has them.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import TIED, Architecture, renamed
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.shared.mamba_keys import mixer_heads, step_limits
from precisionctl.architectures.shared.mamba_rows import BEFORE_MIXER, FINAL_NORM, MIXER

_NAMES = {
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
    "model.layers.": "backbone.layers.",
    ".input_layernorm.": ".norm.",
}
_HEADS = mixer_heads("num_heads", "head_dim", "expand", 64)


def _read_layers(config: keys.Config) -> keys.Fields:
    number = keys.layers(config, absent=64)
    return {"num_layers": number, "mamba.pattern": "M" * number, "rope_layers": (False,) * number}


def _read_heads(config: keys.Config) -> keys.Fields:
    mixer = _HEADS.read(config)
    number, head = mixer["mamba.num_heads"], mixer["mamba.head_dim"]
    of_attention = {"num_attention_heads": number, "num_query_groups": number, "kv_channels": head}
    return {**mixer, **of_attention, "ffn_hidden_size": number * head}


ARCHITECTURE = Architecture(
    model_types={"mamba2": "Mamba2ForCausalLM"},
    rows=(
        *renamed((*llama.EMBEDDING, *BEFORE_MIXER, *MIXER), _NAMES),
        *renamed(FINAL_NORM, _NAMES),
        *llama.OUTPUT,
    ),
    config=(
        keys.Rule(("num_hidden_layers",), _read_layers, keys.LAYERS.write),
        keys.Key("hidden_size", "hidden_size", 4096),
        keys.VOCABULARY,
        keys.Always("max_position_embeddings", 262144),
        keys.Rule(_HEADS.keys, _read_heads, _HEADS.write),
        keys.Key("mamba.num_groups", "n_groups", 8),
        keys.Key("mamba.state_dim", "state_size", 128),
        keys.Only("conv_kernel", 4),
        keys.Only("use_conv_bias", True),
        keys.Only("use_bias", False),
        keys.Only("hidden_act", "silu"),
        step_limits("time_step_limit"),
        keys.Key("norm_epsilon", "layer_norm_epsilon", 1e-5),
        keys.tied(False),
    ),
    aliases=(replace(TIED, of="backbone.embeddings.weight"),),
)
