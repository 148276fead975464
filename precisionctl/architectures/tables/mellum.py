"""Mellum 2: Qwen3-MoE with a window in the layers that config.json lists, which have a rotary base of their own.

Traps: without a list no layer has the window, and all have experts. Rotary parameters are said by kind of layer alone.
A published file may have a layer of multi-token prediction, `mtp.*`, which transformers leaves out.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import nowhere, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope_by_kind
from precisionctl.architectures.shared import deepseek_keys, llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.delta_net_rows import DENSE, prediction
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.architectures.shared.moe_keys import scores
from precisionctl.errors import UnknownArchitecture, shown

_MLPS = (*DENSE, *moe.MOE_NORM, *moe.ROUTER, *moe.EXPERTS)
_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_PREDICTION: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), (None, 0, 1)),
    "mtp_layer_types": (None, [], ["sliding_attention"]),
    "mtp_mlp_layer_types": (None, [], ["sparse"], ["dense"]),
}
"""What may be said of the prediction layer."""
_NUMBER = keys.Key("mtp_num_layers", "num_nextn_predict_layers", 0, synonym="num_mtp_layers")


def _read_prediction(config: keys.Config) -> keys.Fields:
    for key, known in _PREDICTION.items():
        if config.get(key) not in known:
            do = "Known is one prediction layer, with a window, whose MLP is `sparse` or `dense`."
            raise UnknownArchitecture(f"{key}={shown(config[key])}", do=do)
    number = int(_NUMBER.read(config)["mtp_num_layers"])
    return {"mtp_num_layers": number, "mtp_dense": bool(number) and config.get("mtp_mlp_layer_types") == ["dense"]}


ARCHITECTURE = Architecture(
    model_types={"mellum": "MellumForCausalLM"},
    behind={"gate": "experts"},
    rows=(*llama.model_rows(*llama.ATTENTION_NORM, *llama.ATTENTION, *_MLPS), *prediction(*_MLPS)),
    config=llama_keys(
        keys.always("qk_layernorm", True),
        keys.Key("moe.num_experts", "num_experts", synonym="num_local_experts"),
        keys.Key("moe.topk", "num_experts_per_tok", 8),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size"),
        deepseek_keys.experts_by_list(dense=0),
        scores(True),
        heads=keys.heads(num_key_value_heads=4, head_dim=128),
        attention_bias=True,
        rotary=rope_by_kind(500000.0, 10000.0, absent=_ROPE),
        after_rotary=(
            sliding_window(nowhere, absent=1024),
            keys.Rule(
                tuple(_PREDICTION),
                _read_prediction,
                lambda model: {
                    "num_nextn_predict_layers": model.mtp_num_layers,
                    **({"mtp_mlp_layer_types": ["dense"]} if model.mtp_dense else {}),
                },
            ),
        ),
    ),
)
