"""Flint: Qwen3-MoE with a sink for each head, sigmoids as experts' scores and a shared expert; a window in most layers,
and no rotary embeddings in the others.

Traps: files call the sinks `softmax_offset`, as Megatron does, and transformers' class `sinks`; these and routers are
FP32. The first two layers are dense where no key says which. A window that is null is an error, in transformers too.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import layers_in_window, window_fields, write_window
from precisionctl.architectures.param_map import Architecture, Either, renamed
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.architectures.shared.moe_keys import experts_by_number, scores
from precisionctl.architectures.tables.gpt_oss import SINKS

_WIDE_SINKS = tuple(replace(row, keeps_dtype=True) for row in SINKS)
_SINKS = Either(renamed(_WIDE_SINKS, {".sinks": ".softmax_offset"}), in_memory=_WIDE_SINKS)


def _local(config: keys.Config, layers: int) -> list[bool]:
    return [layer > 1 and layer % 4 != 1 and layer != layers - 1 for layer in range(layers)]


def _read_windows(config: keys.Config) -> keys.Fields:
    in_window = layers_in_window(config, _local)
    return {**window_fields(config, in_window, 513), "rope_layers": tuple(in_window)}


ARCHITECTURE = Architecture(
    model_types={"flint": "FlintForCausalLM"},
    behind={"gate": "experts"},
    rows=llama.model_rows(
        *llama.ATTENTION_NORM,
        *llama.ATTENTION,
        _SINKS,
        *llama.MLP_NORM,
        *llama.MLP,
        *moe.MOE_NORM,
        *moe.WIDE_ROUTER,
        *moe.SHARED_EXPERT,
        *moe.EXPERTS,
    ),
    config=llama_keys(
        keys.always("qk_layernorm", True),
        keys.always("softmax_offset", True),
        keys.Key("moe.num_experts", "num_experts", 256),
        keys.Key("moe.topk", "num_experts_per_tok", 6),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size", 512),
        experts_by_number(absent=(0, 1)),
        keys.Key("moe.shared_ffn_hidden_size", "shared_expert_intermediate_size", 1024),
        keys.always("moe.score_function", "sigmoid"),
        scores(True),
        heads=keys.heads(num_key_value_heads=4, head_dim=128),
        attention_bias=True,
        after_rotary=(keys.Rule(("layer_types", "sliding_window"), _read_windows, write_window),),
    ),
)
