"""Gemma 3 (text): Gemma 2 with a norm of each head's query and key instead of soft caps; five layers of six have the
window.

Trap: layers with the window have a rotary base of their own, and the others' scaling is not theirs.
"""

from typing import Any

from precisionctl.architectures.config_keys import Always, Config, Fields, Key, Rule, size, sliding_window
from precisionctl.architectures.gemma2 import COMMON
from precisionctl.architectures.gemma_rows import NOTE, ROWS
from precisionctl.architectures.llama_rows import ROTARY, TIED
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import KEYS, read_rope, rotary_parameters
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model_shape import ModelShape, real


def _read_rope(config: Config, where: object) -> Fields:
    """By kind of layer in transformers 5; transformers 4 has `rope_local_base_freq` beside the usual keys."""
    parameters = rotary_parameters(config, where)
    if not {"full_attention", "sliding_attention"} & parameters.keys():
        local = config.get("rope_local_base_freq", 10000.0)
        fields = read_rope(config, where, parameters, 1e6, 1.0)
        return {**fields, "rotary_base_local": real(local, "rope_local_base_freq", where)}
    by_kind = [parameters.get(kind) or {} for kind in ("full_attention", "sliding_attention")]
    if not all(isinstance(each, dict) for each in by_kind):
        raise DamagedCheckpoint(f"rotary parameters are {shown(parameters)}", where=where)
    beside = {key: value for key, value in config.items() if key != "rope_theta"}
    everywhere, local = (
        read_rope(beside, where, each, base, 1.0) for each, base in zip(by_kind, (1e6, 1e4), strict=True)
    )
    if local["rope_scaling"]:
        raise UnknownArchitecture("rotary scaling in layers with a window", where=where)
    return {**everywhere, "rotary_base_local": local["rotary_base"]}


def _write_rope(model: ModelShape) -> Config:
    config: dict[str, Any] = {"rope_theta": model.rotary_base, "rope_local_base_freq": model.rotary_base_local}
    return config | ({"rope_scaling": dict(model.rope_scaling)} if model.rope_scaling else {})


def _five_of_six(config: Config, layers: int) -> list[bool]:
    every = size({"sliding_window_pattern": 6} | dict(config), "sliding_window_pattern", "config.json")
    return [(layer + 1) % every != 0 for layer in range(layers)]


ARCHITECTURE = Architecture(
    model_types={"gemma3_text": "Gemma3ForCausalLM"},
    rows=ROWS,
    config=(
        *COMMON,
        Always("qk_layernorm", True),
        Key("attn_logit_softcapping", "attn_logit_softcapping", None),
        Key("final_logit_softcapping", "final_logit_softcapping", None),
        Rule((*KEYS, "rope_local_base_freq"), _read_rope, _write_rope),
        sliding_window(_five_of_six, absent=4096, also=("sliding_window_pattern",)),
    ),
    aliases=(TIED,),
    derived=ROTARY,
    note=NOTE,
)
