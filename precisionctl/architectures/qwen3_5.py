"""Qwen3.5's dense text model: Qwen3-Next's layers, with an MLP in each.

Trap: the delta net's input projection is four tensors, of which three go by kind and not by head. Positions in several
dimensions (`mrope`) are all the same in text.
"""

from precisionctl.architectures.config_keys import SIZES
from precisionctl.architectures.delta_net_keys import COMMON, prediction_layers
from precisionctl.architectures.delta_net_rows import MLPS, PREDICTION, delta_net
from precisionctl.architectures.llama_rows import EMBEDDING, FINAL_NORM, OUTPUT, ROTARY, TIED
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rearrange import BY_KIND

IN_PROJ = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

ROWS = (
    *EMBEDDING,
    *delta_net(BY_KIND, *IN_PROJ, values=IN_PROJ[2:]),
    *MLPS,
    *FINAL_NORM,
    *OUTPUT,
    *PREDICTION,
)

PREDICTION_LAYERS = prediction_layers("mtp_num_hidden_layers")

ARCHITECTURE = Architecture(
    model_types={"qwen3_5_text": "Qwen3_5ForCausalLM"},
    rows=ROWS,
    config=(*SIZES, *COMMON, PREDICTION_LAYERS),
    aliases=(TIED,),
    derived=ROTARY,
)
