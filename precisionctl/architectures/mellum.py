"""Mellum 2: Qwen3-MoE with a window in the layers that config.json lists, which have a rotary base of their own.

Traps: without a list no layer has the window, and all have experts. Rotary parameters are said by kind of layer alone.
A published file may have a layer of multi-token prediction, `mtp.*`, which transformers leaves out.
"""

from precisionctl.architectures.config_keys import (
    ATTENTION_BIAS,
    HEADS,
    SILU,
    SIZES,
    Always,
    Config,
    Fields,
    Key,
    Rule,
    sliding_window,
    tied,
)
from precisionctl.architectures.deepseek_keys import experts_by_list
from precisionctl.architectures.delta_net_rows import DENSE, prediction
from precisionctl.architectures.llama_rows import ATTENTION, ATTENTION_NORM, ROTARY, TIED, model_rows
from precisionctl.architectures.moe_rows import EXPERTS, MOE_NORM, ROUTER
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.qwen3_moe import scores
from precisionctl.architectures.rope import rope_by_kind
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model_shape import ModelShape

_MLPS = (*DENSE, *MOE_NORM, *ROUTER, *EXPERTS)
_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_PREDICTION = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")


def _nowhere(config: Config, layers: int) -> list[bool]:
    return [False] * layers


def _read_prediction(config: Config, where: object) -> Fields:
    number = next((config[key] for key in _PREDICTION[:2] if config.get(key) is not None), 0)
    attention, mlp = (config.get(key) for key in _PREDICTION[2:])
    if number not in (0, 1) or attention not in (None, [], ["sliding_attention"]):
        what = f"num_nextn_predict_layers={shown(number)} and mtp_layer_types={shown(attention)}"
        raise UnknownArchitecture(what, where=where, do="Known is one prediction layer, with a window.")
    if mlp not in (None, [], ["sparse"], ["dense"]):
        raise UnknownArchitecture(
            f"mtp_mlp_layer_types={shown(mlp)}", where=where, do="Known are `sparse` and `dense`."
        )
    return {"mtp_num_layers": int(number), "mtp_dense": bool(number) and mlp == ["dense"]}


def _write_prediction(model: ModelShape) -> Config:
    dense = {"mtp_mlp_layer_types": ["dense"]} if model.mtp_dense else {}
    return {"num_nextn_predict_layers": model.mtp_num_layers, **dense}


ARCHITECTURE = Architecture(
    model_types={"mellum": "MellumForCausalLM"},
    rows=(*model_rows(*ATTENTION_NORM, *ATTENTION, *_MLPS), *prediction(*_MLPS)),
    config=(
        *SIZES,
        HEADS,
        ATTENTION_BIAS,
        SILU,
        Always("qk_layernorm", True),
        Key("moe.num_experts", "num_experts", older="num_local_experts"),
        Key("moe.topk", "num_experts_per_tok", 8),
        Key("moe.ffn_hidden_size", "moe_intermediate_size"),
        experts_by_list(dense=0),
        scores(True),
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope_by_kind(500000.0, 10000.0, absent=_ROPE),
        sliding_window(_nowhere, absent=1024),
        Rule(_PREDICTION, _read_prediction, _write_prediction),
        tied(False),
    ),
    aliases=(TIED,),
    derived=ROTARY,
)
