"""Muse Glimmer (text): norms before and after attention and MLP, norms without weights of embeddings, queries and keys,
an output gate, and windows; every fourth layer has no window and no rotary embeddings.

Traps: norms in layers store their factor less one, and the last one its factor; those after a block have an epsilon of
their own. Queries are multiplied by `qk_scale_factor` after their norm, beside the root of a head's size; logits by
`output_multiplier` before they are capped. Of `layer_rope_theta` transformers heeds only which layers have 0. Published
is the wrapper alone, and of a text model by itself transformers has no class.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import layer_types, layers_in_window, window_fields
from precisionctl.architectures.param_map import Architecture, Row
from precisionctl.architectures.rope import KEYS, rope
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.tables.afmoe import GATED_QKV
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_parts import real
from precisionctl.model.model_shape import ModelShape

FINAL_NORM = (Row("model.norm.weight", "decoder.final_layernorm.weight", ("hidden_size",)),)
"""As `final_gamma_whole` says."""


def _all_but_every_fourth(config: keys.Config, layers: int) -> list[bool]:
    """True for every layer but each fourth, counted from the last."""
    return [(layers - 1 - layer) % 4 != 0 for layer in range(layers)]


def positions(parameters: keys.Rule) -> keys.Rule:
    """Rotary embeddings, whose `parameters` are said as everywhere, and the layers that have them."""
    key = "layer_rope_theta"

    def read(config: keys.Config) -> keys.Fields:
        fields, number = parameters.read(config), keys.layers(config)
        turning, listed = _all_but_every_fourth(config, number), config.get(key)
        if listed is not None:
            keys.as_list(listed, key, f"{number} bases", (number,), kinds=(int, float))
            turning = [each != 0 for each in listed]
            for each in listed:
                if each not in (0, fields["rotary_base"]):
                    what = f"{key} has a base of {shown(each)}, and rope_theta is {fields['rotary_base']:g}"
                    raise UnknownArchitecture(what, do="transformers has rope_theta, or none, in all layers.")
        return {**fields, "rope_layers": tuple(turning)}

    def write(model: ModelShape) -> keys.Config:
        turning = model.rope_layers or (True,) * model.num_layers
        return {**parameters.write(model), key: [model.rotary_base if each else 0 for each in turning]}

    return keys.Rule((*KEYS, key), read, write)


def query_scale(absent: float, of_heads: keys.Entry) -> keys.Rule:
    """What queries are multiplied by after their norm; `absent` is the class's default. `of_heads` reads their size."""
    key = "qk_scale_factor"

    def read(config: keys.Config) -> keys.Fields:
        factor = real(config.get(key, absent), key)
        return {"query_pre_attn_scalar": _scalar(factor, of_heads.read(config)["kv_channels"])}

    def write(model: ModelShape) -> keys.Config:
        scalar = model.query_pre_attn_scalar or model.kv_channels
        root = (model.kv_channels / scalar) ** 0.5
        shorter = (float(f"{root:.{digits}g}") for digits in range(1, 17))
        return {key: next((each for each in shorter if _scalar(each, model.kv_channels) == scalar), root)}

    return keys.Rule((key,), read, write)


def _scalar(factor: float, head: int) -> float:
    return float(head / factor**2)


_HEADS = keys.heads(num_key_value_heads=2, head_dim=128)

OF_ALL_MUSES: tuple[keys.Entry, ...] = (
    *keys.SIZES,
    keys.only("attention_bias", False),
    keys.always("zero_centered_gamma", True),
    keys.always("hf_zero_centered_gamma", True),
    keys.always("final_gamma_whole", True),
    keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
    keys.always("post_layernorms", True),
    keys.Key("post_norm_epsilon", "post_norm_eps", 1e-8),
    keys.always("embedding_norm", True),
    keys.always("qk_l2_norm", True),
    keys.always("qk_l2_norm_everywhere", True),
    keys.always("attention_output_gate", True),
    keys.Rule(
        ("sliding_window", "layer_types"),
        lambda config: window_fields(config, layers_in_window(config, _all_but_every_fourth), 2048),
        lambda model: {"sliding_window": model.sliding_window, "layer_types": layer_types(model)},
    ),
    keys.Key("final_logit_softcapping", "final_logit_softcapping", 20.0),
    keys.tied(False),
)

ARCHITECTURE = Architecture(
    model_types={"muse_glimmer_text": "MuseGlimmerForCausalLM"},
    rows=llama.model_rows(*llama.ATTENTION_NORM, GATED_QKV, *llama.PROJ, *llama.AFTER_ATTENTION, ending=FINAL_NORM),
    config=(
        *OF_ALL_MUSES,
        _HEADS,
        keys.only("hidden_activation", "silu", "activation", "silu"),
        query_scale(3.87, _HEADS),
        keys.Key("logit_multiplier", "output_multiplier", 0.19611613513818404),
        positions(rope()),
    ),
    names_by="this project",
)
