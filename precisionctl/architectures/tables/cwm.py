"""CWM (Meta's Code World Model): Llama 3 with a window in all layers but the first of each four.

Trap: its class scales rotary embeddings as Llama 3's where config.json says nothing of them.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import but_first_of_four, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import LLAMA3, rope
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA

_LENGTH = 8192  # where none is said
_ROPE = {"rope_type": "llama3", "rope_theta": 1000000.0, "factor": 16.0, **LLAMA3}


ARCHITECTURE = Architecture(
    model_types={"cwm": "CwmForCausalLM"},
    rows=LLAMA.rows,
    config=(
        *llama_keys(
            keys.only("attention_bias", False),
            keys.Key("mlp_bias", "mlp_bias", False),
            heads=keys.heads(num_key_value_heads=8, head_dim=128),
            epsilon=1e-5,
            rotary=rope(1000000.0, scaling=_ROPE),
            after_rotary=(sliding_window(but_first_of_four, absent=_LENGTH),),
        ),
        # its class takes no null for these, whether or not a layer has the window
        keys.Rule((), write=lambda model: {"bos_token_id": 128000, "sliding_window": model.sliding_window or _LENGTH}),
    ),
)
