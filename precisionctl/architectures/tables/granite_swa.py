"""Granite with a window in three layers of four, and attention sinks.

Traps: the first layer of four is the one without a window; each layer may have a rotary base of its own, and 0 means no
rotary embeddings; the embedding is the head unless config.json says otherwise.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import but_first_of_four, layer_types, layers_in_window, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.tables.gpt_oss import SINKS
from precisionctl.architectures.tables.granite import OF_ALL_GRANITES
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_parts import real
from precisionctl.model.model_shape import ModelShape
from precisionctl.sizes import counted

_ROPE = rope()
_WINDOW = sliding_window(but_first_of_four, absent=128)


def _read_layers(config: keys.Config) -> keys.Fields:
    fields = {**_ROPE.read(config), **_WINDOW.read(config), "softmax_offset": True}
    in_window = layers_in_window(config, but_first_of_four)
    bases = config.get("layer_rope_theta")
    if bases is None:
        return fields
    number = keys.layers(config)
    listed = keys.as_list(bases, "layer_rope_theta", counted(number, "layer"), (number,))
    numbers = [real(base, "layer_rope_theta") if base else 0.0 for base in listed]
    outside, inside = (
        {base for base, window in zip(numbers, in_window, strict=True) if base and window == kind}
        for kind in (False, True)
    )
    several = bool(outside and inside and outside != inside)
    if max(len(outside), len(inside)) > 1 or (several and fields["rope_scaling"]):
        what = f"layer_rope_theta={shown(bases)}"
        do = "Known is one base in layers with a window and one in the others, of which scaling has the same."
        raise UnknownArchitecture(what, do=do)
    return {
        **fields,
        "rotary_base": next(iter(outside or inside or {fields["rotary_base"]})),
        "rotary_base_local": next(iter(inside)) if several else None,
        "rope_layers": tuple(map(bool, numbers)),
    }


def _write_layers(model: ModelShape) -> keys.Config:
    bases = []
    for layer in range(model.num_layers):
        local = model.rotary_base_local if model.in_window(layer) else None
        turns = not model.rope_layers or model.rope_layers[layer]
        bases.append((local or model.rotary_base) if turns else 0)
    return {
        **_ROPE.write(model),
        **_WINDOW.write(model),
        "layer_types": layer_types(model),
        "layer_rope_theta": bases,
    }


LAYERS: tuple[keys.Entry, ...] = (
    keys.Rule((*_ROPE.keys, *_WINDOW.keys, "layer_rope_theta"), _read_layers, _write_layers),
)

ARCHITECTURE = Architecture(
    model_types={"granite_swa": "GraniteSWAForCausalLM"},
    rows=llama.model_rows(*llama.ATTENTION_NORM, *llama.ATTENTION, *SINKS, *llama.MLP_NORM, *llama.MLP),
    config=(
        *OF_ALL_GRANITES,
        keys.heads(num_key_value_heads=4),
        keys.Key("mlp_bias", "mlp_bias", False),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
        *LAYERS,
        keys.tied(True),
    ),
)
