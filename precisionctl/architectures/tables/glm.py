"""GLM-4-9B (glm-4-9b-chat-hf): GLM-4-0414 without norms after attention and MLP.

Traps: half of each head's channels are rotated, in neighbouring pairs; gate and up are one tensor.
"""

from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.tables.glm4 import COMMON

ARCHITECTURE = Architecture(
    model_types={"glm": "GlmForCausalLM"},
    rows=llama.model_rows(*llama.ATTENTION_NORM, *llama.ATTENTION, *llama.MLP_NORM, *llama.JOINED_MLP),
    config=COMMON,
)
