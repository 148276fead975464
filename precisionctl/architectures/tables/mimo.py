"""MiMo: Qwen2 with layers of multi-token prediction under names of their own.

Trap: what joins a prediction layer's two inputs has the hidden state's half first, and Megatron the embedding's.
"""

from precisionctl.architectures.config_keys import Key
from precisionctl.architectures.param_map import Architecture, Row, renamed
from precisionctl.architectures.rearrangements import GAMMA, OTHER_HALF_FIRST
from precisionctl.architectures.shared.llama_rows import ATTENTION, ATTENTION_NORM, MLP, MLP_NORM
from precisionctl.architectures.tables.qwen2 import ARCHITECTURE as QWEN2
from precisionctl.param import ROWS

_PREDICTION = (
    Row("model.mtp_layers.{mtp}.token_layernorm.weight", "mtp.layers.{mtp}.enorm.weight", ("hidden_size",), GAMMA),
    Row("model.mtp_layers.{mtp}.hidden_layernorm.weight", "mtp.layers.{mtp}.hnorm.weight", ("hidden_size",), GAMMA),
    Row(
        "model.mtp_layers.{mtp}.input_proj.weight",
        "mtp.layers.{mtp}.eh_proj.weight",
        ("hidden_size", "doubled_hidden_size"),
        OTHER_HALF_FIRST,
        ROWS,
    ),
    *renamed(
        (*ATTENTION_NORM, *ATTENTION, *MLP_NORM, *MLP),
        {"model.layers.{layer}.": "model.mtp_layers.{mtp}."},
        {"decoder.layers.{layer}.": "mtp.layers.{mtp}.transformer_layer."},
    ),
    Row(
        "model.mtp_layers.{mtp}.final_layernorm.weight",
        "mtp.layers.{mtp}.final_layernorm.weight",
        ("hidden_size",),
        GAMMA,
    ),
)

ARCHITECTURE = Architecture(
    model_types={"mimo": "MiMoForCausalLM"},
    rows=(*QWEN2.rows, *_PREDICTION),
    config=(*QWEN2.config, Key("mtp_num_layers", "num_nextn_predict_layers", 0)),
    aliases=QWEN2.aliases,
    derived=QWEN2.derived,
)
