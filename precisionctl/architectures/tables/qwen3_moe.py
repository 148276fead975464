"""Qwen3-MoE: Qwen3 with experts in the layers that config.json says.

Trap: before experts, the norm is Megatron's `pre_mlp_layernorm`; in a dense layer it is linear_fc1's own.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import everywhere, numbered_layers, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.tables.qwen3 import COMMON
from precisionctl.model.model_shape import ModelShape


def experts_by_number(absent: tuple[int, ...] = ()) -> keys.Rule:
    """Which layers have experts: not those whose numbers `mlp_only_layers` lists, which are `absent` where it does
    not."""

    def read(config: keys.Config) -> keys.Fields:
        said = config.get("mlp_only_layers")
        without = numbered_layers([*absent] if said is None else said, "mlp_only_layers")
        step = keys.size(config, "decoder_sparse_step", absent=1)
        numbers = range(keys.layers(config))
        return {"moe.layer_freq": tuple((layer + 1) % step == 0 and layer not in without for layer in numbers)}

    def write(model: ModelShape) -> keys.Config:
        dense = [layer for layer in range(model.num_layers) if not model.has_experts(layer)]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}

    return keys.Rule(("mlp_only_layers", "decoder_sparse_step"), read, write)


def scores(default: bool) -> keys.Rule:
    """Whether the weights of the chosen experts add up to one; `default` where the key is absent."""
    return keys.Rule(
        ("norm_topk_prob",),
        lambda config: {"moe.pre_softmax": not keys.is_on(config, "norm_topk_prob", default)},
        lambda model: {"norm_topk_prob": not (model.moe and model.moe.pre_softmax)},
    )


SCORES = scores(False)

EXPERTS_OF_LAYERS: tuple[keys.Entry, ...] = (
    keys.Key("moe.num_experts", "num_experts", synonym="num_local_experts"),
    keys.Key("moe.topk", "num_experts_per_tok"),
    keys.Key("moe.ffn_hidden_size", "moe_intermediate_size"),
    experts_by_number(),
)
EXPERT_KEYS: tuple[keys.Entry, ...] = (*EXPERTS_OF_LAYERS, SCORES)

ARCHITECTURE = Architecture(
    model_types={"qwen3_moe": "Qwen3MoeForCausalLM"},
    behind={"gate": "experts"},
    rows=llama.model_rows(
        *llama.ATTENTION_NORM, *llama.ATTENTION, *llama.MLP_NORM, *llama.MLP, *moe.MOE_NORM, *moe.ROUTER, *moe.EXPERTS
    ),
    config=(
        *COMMON,
        keys.heads(num_key_value_heads=4),
        *EXPERT_KEYS,
        sliding_window(everywhere, switch="use_sliding_window", absent=4096, listed=False),
    ),
)
