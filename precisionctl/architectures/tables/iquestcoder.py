"""IQuest-Coder: Llama. The two settings that its own class has besides, no published model uses."""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = Architecture(
    model_types={"iquestcoder": "LlamaForCausalLM"},
    rows=LLAMA.rows,
    config=llama_keys(
        keys.only("clip_qkv", None),
        keys.only("use_sliding_window", False),
        keys.Key("mlp_bias", "mlp_bias", False),
        heads=keys.heads(num_key_value_heads=8, head_dim=128),
        attention_bias=True,
        epsilon=1e-5,
    ),
)
