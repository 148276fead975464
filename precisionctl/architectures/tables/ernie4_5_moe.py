"""ERNIE 4.5 with experts: rotary channels of neighbouring pairs, DeepSeek's experts behind a softmax.

Traps: the bias that chooses experts is added to the softmax over all, and stored as a matrix of one row; the weights of
the chosen ones add up to one.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, Either, Row, renamed
from precisionctl.architectures.rearrangements import SQUEEZED
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.model.model_shape import ModelShape


def _bias(module: str) -> tuple[Row, ...]:
    renamed_rows = renamed(moe.EXPERT_BIAS, {"mlp.gate.": f"mlp.{module}."})
    return tuple(replace(row, rearrangement=SQUEEZED) for row in renamed_rows)


_BIAS = Either(_bias("moe_statics"), in_memory=_bias("gate.moe_statics"))


def _read_layers(config: keys.Config) -> keys.Fields:
    first, last = keys.whole(config, "moe_layer_start_index", 1), keys.whole(config, "moe_layer_end_index", -1)
    step, numbers = keys.size(config, "moe_layer_interval", absent=1), range(keys.layers(config))
    last = numbers[-1] if last == -1 else last
    return {"moe.layer_freq": tuple((layer + 1) % step == 0 and first <= layer <= last for layer in numbers)}


def _write_layers(model: ModelShape) -> keys.Config:
    those = [layer for layer in range(model.num_layers) if model.has_experts(layer)] or [model.num_layers]
    step = those[1] - those[0] if len(those) > 1 else 1
    return {"moe_layer_start_index": those[0], "moe_layer_end_index": those[-1], "moe_layer_interval": step}


ARCHITECTURE = Architecture(
    model_types={"ernie4_5_moe": "Ernie4_5_MoeForCausalLM"},
    rows=deepseek_rows.decoder(
        (*llama.ATTENTION_NORM, *llama.ATTENTION), routing=(*moe.WIDE_ROUTER, _BIAS, *moe.SHARED_EXPERTS)
    ),
    config=llama_keys(
        keys.only("use_bias", False),
        keys.Key("moe.num_experts", "moe_num_experts", 64, synonym="num_experts"),
        keys.Key("moe.topk", "moe_k", 6, synonym="num_experts_per_tok"),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size", 1536),
        deepseek_keys.shared_experts("moe_num_shared_experts", 2, inner=1536),
        keys.Rule(("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"), _read_layers, _write_layers),
        keys.only("moe_norm_min", 1e-12),
        keys.always("moe.expert_bias", True),
        keys.always("rotary_interleaved", True),
        heads=keys.heads(num_key_value_heads=4),
        epsilon=1e-5,
        rotary=rope(500000.0),
        tied=True,
    ),
    names_by="Megatron-Bridge",
)
