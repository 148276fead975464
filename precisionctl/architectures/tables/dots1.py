"""dots.llm1: Qwen3's attention before DeepSeek-V3's experts.

Traps: without `norm_topk_prob`, which is its class's default, it is another model; scores are sigmoids whatever
`scoring_func` says.
"""

from precisionctl.architectures.config_keys import ATTENTION_BIAS, SILU, SIZES, Always, Config, Key, Only, heads, tied
from precisionctl.architectures.config_layers import sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.deepseek_keys import experts, groups
from precisionctl.architectures.shared.deepseek_rows import decoder
from precisionctl.architectures.shared.llama_rows import ATTENTION, ATTENTION_NORM


def _after_the_first(config: Config, layers: int) -> list[bool]:
    first = config.get("max_window_layers", 62)
    return [first is not None and layer >= first for layer in range(layers)]


ARCHITECTURE = Architecture(
    model_types={"dots1": "Dots1ForCausalLM"},
    behind={"gate": "experts"},
    rows=decoder((*ATTENTION_NORM, *ATTENTION)),
    config=(
        *SIZES,
        heads(num_key_value_heads=32),
        ATTENTION_BIAS,
        SILU,
        Always("qk_layernorm", True),
        *experts(shared=None, dense=0),
        Always("moe.score_function", "sigmoid"),
        Always("moe.expert_bias", True),
        Only("norm_topk_prob", True, absent=False),
        groups(1, 1),
        Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.0),
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        sliding_window(_after_the_first, absent=4096, also=("max_window_layers",)),
        tied(False),
    ),
)
