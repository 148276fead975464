"""OLMo 2: Llama with norms after attention and MLP, and none before them; queries and keys are normalised over all
heads.

Trap: `post_attention_layernorm` is what its name says here, and not Llama's norm before the MLP.
"""

from precisionctl.architectures.config_keys import ATTENTION_BIAS, HEADS, SILU, SIZES, Always, Entry, Key, tied
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.gemma_rows import POST_ATTENTION_NORM, POST_MLP_NORM
from precisionctl.architectures.shared.llama_rows import (
    MLP,
    PROJ,
    QK_NORMS_OVER_HEADS,
    QKV_LINEAR,
    model_rows,
)

NORM_OVER_HEADS: tuple[Entry, ...] = (Always("qk_layernorm", True), Always("qk_layernorm_over_heads", True))

ROWS = model_rows(*QKV_LINEAR, *QK_NORMS_OVER_HEADS, *PROJ, *POST_ATTENTION_NORM, *MLP, *POST_MLP_NORM)

COMMON: tuple[Entry, ...] = (
    *SIZES,
    HEADS,
    ATTENTION_BIAS,
    SILU,
    *NORM_OVER_HEADS,
    Always("pre_layernorms", False),
    Always("post_layernorms", True),
    Key("norm_epsilon", "rms_norm_eps", 1e-5),
    tied(False),
)

ARCHITECTURE = Architecture(
    model_types={"olmo2": "Olmo2ForCausalLM"},
    rows=ROWS,
    config=(*COMMON, rope()),
    names_by="this project",
)
