"""Bamba: a Mamba-2 mixer or attention, then an MLP, each block a layer of Megatron's hybrid stack, as in Granite 4.

Traps: half of a head has positions, whatever `partial_rotary_factor` beside the rotary parameters says; published
files say it as `attn_rotary_emb`, by which vLLM goes and transformers does not; layers with attention are listed by
their numbers.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import numbered_layers
from precisionctl.architectures.param_map import Architecture, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.shared.mamba_keys import MIXER, step_limits
from precisionctl.architectures.shared.mamba_rows import FINAL_NORM, MIXER_OR_ATTENTION
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape

_NAMES = {
    "{layer}": "{hf_layer}",
    ".mixer.": ".mamba.",
    ".mlp.": ".feed_forward.",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
}
_SHARE = 0.5
_ROPE = rope(percent=_SHARE, partial=True)


def _read_layers(config: keys.Config) -> keys.Fields:
    number, listed = keys.layers(config), config.get("attn_layer_indices")
    attention = numbered_layers([] if listed is None else listed, "attn_layer_indices")
    beyond = sorted(attention - {*range(number)})
    if beyond:
        what = f"attn_layer_indices has layer {shown(beyond[0])}, of {number}"
        raise DamagedCheckpoint(what, do="Is config.json this model's?")
    pattern = "".join("*-" if layer in attention else "M-" for layer in range(number))
    return {"num_layers": len(pattern), "mamba.pattern": pattern}


def _write_layers(model: ModelShape) -> keys.Config:
    blocks = model.mamba.pattern[::2] if model.mamba else ""
    attention = [layer for layer, block in enumerate(blocks) if block == "*"]
    return {"num_hidden_layers": len(blocks), "attn_layer_indices": attention}


def _read_rope(config: keys.Config) -> keys.Fields:
    fields = _ROPE.read(config)
    if fields["rotary_percent"] != _SHARE:
        what = f"no bamba known here has partial_rotary_factor={shown(fields['rotary_percent'])}"
        raise UnknownArchitecture(what, do=f"transformers turns {_SHARE} of a head.")
    turned, said = int(keys.HEADS.read(config)["kv_channels"] * _SHARE), config.get("attn_rotary_emb")
    if said not in (None, turned):
        what = f"attn_rotary_emb is {shown(said)}, and transformers turns {turned} channels of a head"
        raise DamagedCheckpoint(what, do="Is config.json this model's?")
    return fields


ARCHITECTURE = Architecture(
    model_types={"bamba": "BambaForCausalLM"},
    rows=llama.model_rows(
        *renamed((*MIXER_OR_ATTENTION, *llama.MLP_NORM, *llama.MLP), _NAMES),
        ending=renamed(FINAL_NORM, {"model.norm.": "model.final_layernorm."}),
    ),
    config=(
        keys.Rule(("num_hidden_layers", "attn_layer_indices"), _read_layers, _write_layers),
        keys.Key("hidden_size", "hidden_size"),
        keys.Key("ffn_hidden_size", "intermediate_size", 14336),
        keys.Key("max_position_embeddings", "max_position_embeddings", 262144),
        keys.VOCABULARY,
        keys.heads(num_key_value_heads=8),
        *MIXER,
        keys.only("attention_bias", False),
        keys.only("mlp_bias", False),
        step_limits("time_step_limit"),
        keys.SILU,
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
        keys.Rule(
            (*_ROPE.keys, "attn_rotary_emb"),
            _read_rope,
            lambda model: {**_ROPE.write(model), "attn_rotary_emb": model.rotary_size},
        ),
        keys.tied(False),
    ),
)
