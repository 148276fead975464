"""config.json's keys of layers with experts that several families have in common."""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import numbered_layers
from precisionctl.model.model_shape import ModelShape

INTERMEDIATE_SIZE_OF_EXPERTS = keys.Rule(
    (),
    lambda config: {
        **keys.EVERY_LAYER_SPARSE.read(config),
        "moe.ffn_hidden_size": keys.size(config, "intermediate_size"),
    },
    lambda model: {"intermediate_size": model.moe.ffn_hidden_size} if model.moe else {},
)
"""Experts in every layer, of which `intermediate_size` is one's (SIZES read it as an MLP's)."""

JITTER = keys.Rule(("router_jitter_noise",))
"""Noise by which a router's input is multiplied in training alone: `resume` has none."""


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
