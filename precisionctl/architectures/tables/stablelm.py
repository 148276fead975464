"""StableLM 2 and StableLM-3B: Llama with LayerNorm, and a quarter of each head's channels rotated.

Trap: StableLM 2 12B, with norms by head and a parallel residual, is not covered.
"""

from precisionctl.architectures.config_keys import SILU, SIZES, Always, Key, Only, heads, tied
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION,
    ATTENTION_NORM,
    FINAL_NORM,
    MLP,
    MLP_NORM,
    NORM_BIASES,
    model_rows,
)

ARCHITECTURE = Architecture(
    model_types={"stablelm": "StableLmForCausalLM"},
    rows=model_rows(*ATTENTION_NORM, *ATTENTION, *MLP_NORM, *MLP, ending=(*FINAL_NORM, *NORM_BIASES)),
    config=(
        *SIZES,
        heads(num_key_value_heads=32),
        SILU,
        Key("qkv_bias", "use_qkv_bias", False),
        Only("qk_layernorm", False),
        Only("use_parallel_residual", False),
        Always("normalization", "LayerNorm"),
        Key("norm_epsilon", "layer_norm_eps", 1e-5),
        rope(percent=0.25, partial=True),
        tied(False),
    ),
)
