"""Cohere's North Micro: Command A's layers, whose rotary channels are halves, with parameters for each kind of layers.

Traps: a kind whose parameters are null has no rotary embeddings, whether it has a window or not; a null for
`logit_scale` is 1. Published files have a base for all kinds beside those of each, which transformers passes over.
"""

from typing import Any

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import WINDOWS, layers_in_window, nowhere, window_fields, write_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import KEYS, rope_of_kinds, rotary_parameters, write_rope_of_kinds
from precisionctl.architectures.tables.cohere import BLOCKS, LAYER_NORM, ROWS
from precisionctl.errors import DamagedCheckpoint
from precisionctl.model.model_shape import ModelShape


def _read_layers(config: keys.Config) -> keys.Fields:
    windows = layers_in_window(config, nowhere)
    parameters = rotary_parameters(config, 1e4)
    if lacking := [kind for kind, has in WINDOWS.items() if has in windows and kind not in parameters]:
        do = "Say them in `rope_parameters` by kind, or null for none."
        raise DamagedCheckpoint(f"no rotary parameters of layers of type {lacking[0]}", do=do)
    turning = {has for kind, has in WINDOWS.items() if parameters.get(kind) is not None}
    turned = [each for each in windows if each in turning]
    fields = rope_of_kinds(config, turned, {}, 1.0, partial=False) if turned else {}
    return {
        **fields,
        **window_fields(config, windows, 4096),
        "rope_layers": tuple(each in turning for each in windows),
    }


def _write_layers(model: ModelShape) -> keys.Config:
    parameters: dict[str, Any] = dict.fromkeys(WINDOWS)
    said = write_rope_of_kinds(model)["rope_parameters"]
    for layer, in_window in enumerate(model.windows):
        if model.has_rope(layer):
            kind = "sliding_attention" if in_window else "full_attention"
            parameters[kind] = said[kind]
    return {**write_window(model), "rope_parameters": parameters}


ARCHITECTURE = Architecture(
    model_types={"cohere_compass_text": "CohereCompassForCausalLM"},
    rows=ROWS,
    config=(
        *BLOCKS,
        keys.HEADS,
        *LAYER_NORM,
        keys.Key("logit_multiplier", "logit_scale", 1.0),
        keys.Rule((*KEYS, "layer_types", "sliding_window"), _read_layers, _write_layers),
        keys.tied(True),
    ),
    names_by="this project",
)
