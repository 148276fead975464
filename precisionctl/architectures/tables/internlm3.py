"""InternLM3: Llama, with the older names `qkv_bias` and `bias` for the switches of biases."""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = Architecture(
    model_types={"internlm3": "InternLM3ForCausalLM"},
    rows=LLAMA.rows,
    config=llama_keys(
        keys.Key("qkv_bias", "attention_bias", False, synonym="qkv_bias"),
        keys.Key("proj_bias", "mlp_bias", False, synonym="bias"),
        keys.Key("mlp_bias", "mlp_bias", False, synonym="bias"),
        heads=keys.heads(num_key_value_heads=2, head_dim=128),
        epsilon=1e-5,
    ),
)
