"""MiMo: Qwen2 with layers of multi-token prediction under names of their own.

Trap: what joins a prediction layer's two inputs has the hidden state's half first, and Megatron the embedding's.
"""

from precisionctl.architectures.config_keys import Key
from precisionctl.architectures.param_map import Architecture, renamed
from precisionctl.architectures.rearrangements import OTHER_HALF_FIRST
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION,
    ATTENTION_NORM,
    MLP,
    MLP_NORM,
    PREDICTION_LAYER,
    prediction_layer,
)
from precisionctl.architectures.tables.qwen2 import ARCHITECTURE as QWEN2

_NAMES = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
_PREDICTION = prediction_layer(
    (f"model.mtp_layers.{{mtp}}.{name}" for name in _NAMES),
    renamed(
        (*ATTENTION_NORM, *ATTENTION, *MLP_NORM, *MLP),
        {"model.layers.{layer}.": "model.mtp_layers.{mtp}."},
        PREDICTION_LAYER,
    ),
    joined=OTHER_HALF_FIRST,
)

ARCHITECTURE = Architecture(
    model_types={"mimo": "MiMoForCausalLM"},
    rows=(*QWEN2.rows, *_PREDICTION),
    config=(*QWEN2.config, Key("mtp_num_layers", "num_nextn_predict_layers", 0)),
)
