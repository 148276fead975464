"""StableLM 2 and StableLM-3B: Llama with LayerNorm, and a quarter of each head's channels rotated.

Trap: StableLM 2 12B, with norms by head and a parallel residual, is not covered.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama

ARCHITECTURE = Architecture(
    model_types={"stablelm": "StableLmForCausalLM"},
    rows=llama.model_rows(
        *llama.ATTENTION_NORM,
        *llama.ATTENTION,
        *llama.MLP_NORM,
        *llama.MLP,
        ending=(*llama.FINAL_NORM, *llama.NORM_BIASES),
    ),
    config=(
        *keys.SIZES,
        keys.heads(num_key_value_heads=32),
        keys.SILU,
        keys.Key("qkv_bias", "use_qkv_bias", False),
        keys.only("qk_layernorm", False),
        keys.only("use_parallel_residual", False),
        keys.always("normalization", "LayerNorm"),
        keys.Key("norm_epsilon", "layer_norm_eps", 1e-5),
        rope(percent=0.25, partial=True),
        keys.tied(False),
    ),
)
