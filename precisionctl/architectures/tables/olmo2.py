"""OLMo 2: Llama with norms after attention and MLP, and none before them; queries and keys are normalised over all
heads.

Trap: `post_attention_layernorm` is what its name says here, and not Llama's norm before the MLP.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama

NORM_OVER_HEADS: tuple[keys.Entry, ...] = (
    keys.always("qk_layernorm", True),
    keys.always("qk_layernorm_over_heads", True),
)

ROWS = llama.model_rows(
    *llama.QKV_LINEAR,
    *llama.QK_NORMS_OVER_HEADS,
    *llama.PROJ,
    *llama.POST_ATTENTION_NORM,
    *llama.MLP,
    *llama.POST_MLP_NORM,
)

COMMON: tuple[keys.Entry, ...] = (
    *keys.SIZES,
    keys.HEADS,
    keys.ATTENTION_BIAS,
    keys.SILU,
    *NORM_OVER_HEADS,
    keys.always("pre_layernorms", False),
    keys.always("post_layernorms", True),
    keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
    keys.tied(False),
)

ARCHITECTURE = Architecture(
    model_types={"olmo2": "Olmo2ForCausalLM"},
    rows=ROWS,
    config=(*COMMON, rope()),
    names_by="this project",
)
