"""MiMo: Qwen2 with layers of multi-token prediction under names of their own.

Trap: what joins a prediction layer's two inputs has the hidden state's half first, and Megatron the embedding's.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, renamed
from precisionctl.architectures.rearrangements import OTHER_HALF_FIRST
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.tables.qwen2 import ARCHITECTURE as QWEN2

_NAMES = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
_PREDICTION = llama.prediction_layer(
    (f"model.mtp_layers.{{mtp}}.{name}" for name in _NAMES),
    renamed(
        (*llama.ATTENTION_NORM, *llama.ATTENTION, *llama.MLP_NORM, *llama.MLP),
        {"model.layers.{layer}.": "model.mtp_layers.{mtp}."},
        llama.PREDICTION_LAYER,
    ),
    joined=OTHER_HALF_FIRST,
)

ARCHITECTURE = Architecture(
    model_types={"mimo": "MiMoForCausalLM"},
    rows=(*QWEN2.rows, *_PREDICTION),
    config=(*QWEN2.config, keys.Key("mtp_num_layers", "num_nextn_predict_layers", 0)),
)
