"""Gemma 3 (text): Gemma 2 with a norm of each head's query and key instead of soft caps; five layers of six have the
window.

Trap: layers with the window have a rotary base of their own, and the others' scaling is not theirs.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import all_but_every, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope_by_kind
from precisionctl.architectures.tables.gemma2 import COMMON, ROWS

ARCHITECTURE = Architecture(
    model_types={"gemma3_text": "Gemma3ForCausalLM"},
    rows=ROWS,
    config=(
        *COMMON,
        keys.always("qk_layernorm", True),
        keys.only("attn_logit_softcapping", None),  # transformers' class keeps it, and computes without
        keys.Key("final_logit_softcapping", "final_logit_softcapping", None),
        rope_by_kind(1e6, 1e4, local_key=True),
        sliding_window(all_but_every(6, "sliding_window_pattern"), absent=4096, also=("sliding_window_pattern",)),
    ),
    names_by="Megatron-Bridge",
)
