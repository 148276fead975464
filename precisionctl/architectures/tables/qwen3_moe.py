"""Qwen3-MoE: Qwen3 with experts in the layers that config.json says.

Trap: before experts, the norm is Megatron's `pre_mlp_layernorm`; in a dense layer it is linear_fc1's own.
"""

from precisionctl.architectures.config_keys import Config, Entry, Fields, Key, Rule, heads, is_on, layers, size
from precisionctl.architectures.config_layers import everywhere, numbered_layers, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION,
    ATTENTION_NORM,
    MLP,
    MLP_NORM,
    model_rows,
)
from precisionctl.architectures.shared.moe_rows import EXPERTS, MOE_NORM, ROUTER
from precisionctl.architectures.tables.qwen3 import COMMON
from precisionctl.model.model_shape import ModelShape


def experts_by_number(absent: tuple[int, ...] = ()) -> Rule:
    """Which layers have experts: not those whose numbers `mlp_only_layers` lists, which are `absent` where it does
    not."""

    def read(config: Config) -> Fields:
        said = config.get("mlp_only_layers")
        without = numbered_layers([*absent] if said is None else said, "mlp_only_layers")
        step = size({"decoder_sparse_step": 1} | dict(config), "decoder_sparse_step")
        numbers = range(layers(config))
        return {"moe.layer_freq": tuple((layer + 1) % step == 0 and layer not in without for layer in numbers)}

    def write(model: ModelShape) -> Config:
        dense = [layer for layer in range(model.num_layers) if not model.has_experts(layer)]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}

    return Rule(("mlp_only_layers", "decoder_sparse_step"), read, write)


def scores(default: bool) -> Rule:
    """Whether the weights of the chosen experts add up to one; `default` where the key is absent."""
    return Rule(
        ("norm_topk_prob",),
        lambda config: {"moe.pre_softmax": not is_on(config, "norm_topk_prob", default)},
        lambda model: {"norm_topk_prob": not (model.moe and model.moe.pre_softmax)},
    )


SCORES = scores(False)

EXPERTS_OF_LAYERS: tuple[Entry, ...] = (
    Key("moe.num_experts", "num_experts", synonym="num_local_experts"),
    Key("moe.topk", "num_experts_per_tok"),
    Key("moe.ffn_hidden_size", "moe_intermediate_size"),
    experts_by_number(),
)
EXPERT_KEYS: tuple[Entry, ...] = (*EXPERTS_OF_LAYERS, SCORES)

ARCHITECTURE = Architecture(
    model_types={"qwen3_moe": "Qwen3MoeForCausalLM"},
    behind={"gate": "experts"},
    rows=model_rows(*ATTENTION_NORM, *ATTENTION, *MLP_NORM, *MLP, *MOE_NORM, *ROUTER, *EXPERTS),
    config=(
        *COMMON,
        heads(num_key_value_heads=4),
        *EXPERT_KEYS,
        sliding_window(everywhere, switch="use_sliding_window", absent=4096, listed=False),
    ),
)
