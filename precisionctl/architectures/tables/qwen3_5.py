"""Qwen3.5's dense text model: Qwen3-Next's layers, with an MLP in each.

Trap: the delta net's input projection is four tensors, of which three go by kind and not by head. Positions in several
dimensions (`mrope`) are all the same in text.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, Either, Row
from precisionctl.architectures.rearrangements import BY_KIND
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.shared.delta_net_keys import COMMON, prediction_layers
from precisionctl.architectures.shared.delta_net_rows import DENSE, delta_net, prediction

IN_PROJ = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def rows(*mlp: Row | Either) -> tuple[Row | Either, ...]:
    """All, where these are the rows of a layer's MLP."""
    attention = delta_net(BY_KIND, *IN_PROJ, values=IN_PROJ[2:])
    return (*llama.model_rows(*attention, *mlp), *prediction(*mlp))


PREDICTION_LAYERS = prediction_layers("mtp_num_hidden_layers")

ARCHITECTURE = Architecture(
    model_types={"qwen3_5_text": "Qwen3_5ForCausalLM"},
    rows=rows(*DENSE),
    config=(*keys.SIZES, *COMMON, keys.heads(num_key_value_heads=4, head_dim=256), PREDICTION_LAYERS),
)
