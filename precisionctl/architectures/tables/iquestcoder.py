"""IQuest-Coder: Llama. The two settings that its own class has besides, no published model uses."""

from precisionctl.architectures.config_keys import ATTENTION_BIAS, SILU, SIZES, Key, Only, heads, tied
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = Architecture(
    model_types={"iquestcoder": "LlamaForCausalLM"},
    rows=LLAMA.rows,
    config=(
        *SIZES,
        heads(num_key_value_heads=8, head_dim=128),
        ATTENTION_BIAS,
        SILU,
        Only("clip_qkv", None),
        Only("use_sliding_window", False),
        Key("mlp_bias", "mlp_bias", False),
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(),
        tied(False),
    ),
)
