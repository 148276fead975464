"""dots.llm1: Qwen3's attention before DeepSeek-V3's experts.

Traps: without `norm_topk_prob`, which is its class's default, it is another model; scores are sigmoids whatever
`scoring_func` says.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import from_max_window_layers, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama
from precisionctl.architectures.shared.llama_keys import llama_keys

ARCHITECTURE = Architecture(
    model_types={"dots1": "Dots1ForCausalLM"},
    behind={"gate": "experts"},
    rows=deepseek_rows.decoder((*llama.ATTENTION_NORM, *llama.ATTENTION)),
    config=llama_keys(
        keys.always("qk_layernorm", True),
        *deepseek_keys.experts(shared=None, dense=0),
        keys.always("moe.score_function", "sigmoid"),
        keys.always("moe.expert_bias", True),
        keys.only("norm_topk_prob", True, absent=False),
        deepseek_keys.groups(1, 1),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.0),
        heads=keys.heads(num_key_value_heads=32),
        attention_bias=True,
        after_rotary=(
            sliding_window(from_max_window_layers(62), absent=4096, null_is_none=True, also=("max_window_layers",)),
        ),
    ),
)
