"""IQuest-Coder: Llama. The two settings that its own class has besides, no published model uses."""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = Architecture(
    model_types={"iquestcoder": "LlamaForCausalLM"},
    rows=LLAMA.rows,
    config=(
        *keys.SIZES,
        keys.heads(num_key_value_heads=8, head_dim=128),
        keys.ATTENTION_BIAS,
        keys.SILU,
        keys.Only("clip_qkv", None),
        keys.Only("use_sliding_window", False),
        keys.Key("mlp_bias", "mlp_bias", False),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(),
        keys.tied(False),
    ),
)
