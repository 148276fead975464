"""Flint: Qwen3-MoE with a sink for each head, sigmoids as experts' scores and a shared expert; a window in most layers,
and no rotary embeddings in the others.

Traps: files call the sinks `softmax_offset`, as Megatron does, and transformers' class `sinks`; these and routers are
FP32. The first two layers are dense where no key says which. A window that is null is an error, in transformers too.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import (
    ATTENTION_BIAS,
    SILU,
    SIZES,
    Always,
    Config,
    Fields,
    Key,
    Rule,
    heads,
    tied,
)
from precisionctl.architectures.config_layers import layers_in_window, window_fields, write_window
from precisionctl.architectures.param_map import Architecture, Either, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION,
    ATTENTION_NORM,
    MLP,
    MLP_NORM,
    model_rows,
)
from precisionctl.architectures.shared.moe_rows import EXPERTS, MOE_NORM, SHARED_EXPERT, WIDE_ROUTER
from precisionctl.architectures.tables.gpt_oss import SINKS
from precisionctl.architectures.tables.qwen3_moe import experts_by_number, scores

_WIDE_SINKS = tuple(replace(row, keeps_dtype=True) for row in SINKS)
_SINKS = Either(renamed(_WIDE_SINKS, {".sinks": ".softmax_offset"}), _WIDE_SINKS, second_is="in memory")


def _local(config: Config, layers: int) -> list[bool]:
    return [layer > 1 and layer % 4 != 1 and layer != layers - 1 for layer in range(layers)]


def _read_windows(config: Config) -> Fields:
    in_window = layers_in_window(config, _local)
    return {**window_fields(config, in_window, 513), "rope_layers": tuple(in_window)}


ARCHITECTURE = Architecture(
    model_types={"flint": "FlintForCausalLM"},
    behind={"gate": "experts"},
    rows=model_rows(
        *ATTENTION_NORM,
        *ATTENTION,
        _SINKS,
        *MLP_NORM,
        *MLP,
        *MOE_NORM,
        WIDE_ROUTER,
        *SHARED_EXPERT,
        *EXPERTS,
    ),
    config=(
        *SIZES,
        heads(num_key_value_heads=4, head_dim=128),
        ATTENTION_BIAS,
        SILU,
        Always("qk_layernorm", True),
        Always("softmax_offset", True),
        Key("moe.num_experts", "num_experts", 256),
        Key("moe.topk", "num_experts_per_tok", 6),
        Key("moe.ffn_hidden_size", "moe_intermediate_size", 512),
        experts_by_number(absent=(0, 1)),
        Key("moe.shared_ffn_hidden_size", "shared_expert_intermediate_size", 1024),
        Always("moe.score_function", "sigmoid"),
        scores(True),
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        Rule(("layer_types", "sliding_window"), _read_windows, write_window),
        tied(False),
    ),
)
