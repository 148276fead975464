"""GLM-4-9B (glm-4-9b-chat-hf): GLM-4-0414 without norms after attention and MLP.

Traps: half of each head's channels are rotated, in neighbouring pairs; gate and up are one tensor.
"""

from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION,
    ATTENTION_NORM,
    JOINED_MLP,
    MLP_NORM,
    model_rows,
)
from precisionctl.architectures.tables.glm4 import COMMON

ARCHITECTURE = Architecture(
    model_types={"glm": "GlmForCausalLM"},
    rows=model_rows(*ATTENTION_NORM, *ATTENTION, *MLP_NORM, *JOINED_MLP),
    config=COMMON,
)
