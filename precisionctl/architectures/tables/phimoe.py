"""Phi-3.5-MoE: Mixtral with LayerNorms, biases in attention and of the output, and SparseMixer's router.

Traps: the router always chooses two experts, one after the other, and the weight of each is near 1; in training it
samples them, and multiplies inputs by noise, which the released weights do not need. A scaling of rotary embeddings has
`short_mscale` and `long_mscale` in the place of a factor of attention. Its class has another name in published files
than in transformers (`PhimoeForCausalLM`), and engines go by the published one. Megatron-Core has no bias of
attention's output beside experts without biases.
"""

from dataclasses import replace
from typing import Any

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import everywhere, sliding_window
from precisionctl.architectures.param_map import Architecture, Row, only_with, renamed, when
from precisionctl.architectures.rope import KEYS, rope, rotary_parameters
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.moe_keys import INTERMEDIATE_SIZE_OF_EXPERTS
from precisionctl.architectures.tables.mixtral import EXPERTS
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_parts import real
from precisionctl.model.model_shape import ModelShape

_PROJ, _PROJ_BIAS = llama.PROJ
_ATTENTION = (*llama.QKV_LINEAR, _PROJ, replace(_PROJ_BIAS, present=when("proj_bias")))
_MOE_NORM_BIAS = Row(
    "model.layers.{layer}.post_attention_layernorm.bias",
    "decoder.layers.{layer}.pre_mlp_layernorm.bias",
    ("hidden_size",),
    layers="moe",
)
_EXPERTS = replace(EXPERTS, in_memory=renamed(EXPERTS.in_memory, {"mlp.gate.": "mlp.router."}))

_BASE = 1e6
_ROPE = rope(_BASE)
_MSCALES = ("short_mscale", "long_mscale")


def _read_rope(config: keys.Config) -> keys.Fields:
    fields = _ROPE.read(config)
    scaling = fields["rope_scaling"]
    if scaling is None:
        return fields
    if scaling["rope_type"] != "longrope":
        what = f"no {config.get('model_type')} known here has rotary scaling of type {shown(scaling['rope_type'])}"
        raise UnknownArchitecture(what, do="Known is longrope.")
    parameters = rotary_parameters(config, _BASE)
    short, long = (real(parameters.get(name), name) for name in _MSCALES)
    if short != long:
        raise UnknownArchitecture(f"short_mscale={short} and long_mscale={long} differ")
    if "attention_factor" in scaling:
        raise DamagedCheckpoint("attention_factor beside short_mscale, which is meant to be it")
    return {**fields, "rope_scaling": {**scaling, "attention_factor": short}}


def _write_rope(model: ModelShape) -> keys.Config:
    config = _ROPE.write(model)
    if model.rope_scaling is None:
        return config
    scaling: dict[str, Any] = dict(model.rope_scaling)
    magnitude = scaling.pop("attention_factor", None)
    return {**config, "rope_scaling": scaling | dict.fromkeys(_MSCALES, magnitude)}


ARCHITECTURE = Architecture(
    model_types={"phimoe": "PhiMoEForCausalLM"},
    rows=(
        *llama.model_rows(
            *llama.ATTENTION_LAYER_NORM,
            *_ATTENTION,
            *moe.MOE_NORM,
            _MOE_NORM_BIAS,
            _EXPERTS,
            ending=llama.FINAL_LAYER_NORM,
        ),
        *only_with("output_bias", llama.OUTPUT_BIAS),
    ),
    config=(
        *keys.SIZES,
        keys.heads(num_key_value_heads=8),
        keys.SILU,
        keys.always("normalization", "LayerNorm"),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
        keys.ATTENTION_BIAS,
        keys.always("add_bias_linear", False),
        keys.Key("output_bias", "lm_head_bias", False),
        keys.Key("moe.num_experts", "num_local_experts", 16),
        keys.only("num_experts_per_tok", 2, "moe.topk", 2),
        INTERMEDIATE_SIZE_OF_EXPERTS,
        keys.Key("moe.sparsemixer_eps", "router_jitter_noise", 0.01),
        keys.Rule(("input_jitter_noise",)),  # of training alone
        keys.Rule((*KEYS, *_MSCALES), _read_rope, _write_rope),
        sliding_window(everywhere, listed=False),
        keys.only("tie_word_embeddings", False, "tied_embeddings", False),
        keys.TWO_CLASSES,
    ),
    aliases=(),
    names_by="this project",
)
