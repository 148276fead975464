"""Kimi Linear: Kimi delta attention, in every fourth layer latent attention without positions, and DeepSeek-V3's
experts.

Traps: published files number layers from 1; name experts, and what is beside them, as Mixtral does, but not dense MLPs,
of which transformers saves the same name; and have A_log in four dimensions. config.json says scalings and bases of
rotary embeddings that nothing turns by.
"""

from precisionctl.architectures.config_keys import Config, Fields, Key, Only, Rule, layers
from precisionctl.architectures.config_layers import listed_layers
from precisionctl.architectures.param_map import Architecture, Either, Row, only_in, renamed
from precisionctl.architectures.rearrangements import Squeezed
from precisionctl.architectures.shared.deepseek_keys import experts_by_list
from precisionctl.architectures.shared.deepseek_rows import LATENT_ATTENTION, ROUTING
from precisionctl.architectures.shared.delta_net_keys import KINDS
from precisionctl.architectures.shared.kda_keys import (
    BESIDE,
    LISTS,
    checked,
    common,
    layer_lists,
    read_sizes,
    shared_out,
    write_sizes,
)
from precisionctl.architectures.shared.kda_rows import either, in_memory, kda
from precisionctl.architectures.shared.llama_rows import MLP, MLP_NORM, SEPARATE_NORM, model_rows
from precisionctl.architectures.shared.moe_rows import FUSED, MOE_NORM, experts
from precisionctl.model.model_shape import ModelShape

_KDA = kda(low_rank=True, a_log=Squeezed((1, 1, -1, 1)))
_SPARSE = {".mlp.": ".block_sparse_moe."}
_BESIDE = tuple(row for row in ROUTING if isinstance(row, Row))
EXPERTS = experts(*(f"model.layers.{{layer}}.block_sparse_moe.experts.{{expert}}.w{n}.weight" for n in (1, 3, 2)))

_ABSENT = {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}
"""What its class takes for sizes that are not there."""


def _read_kda(config: Config) -> Fields:
    said = checked(config.get("linear_attn_config", {}), "kimi_linear")
    sizes = read_sizes(said, config, _ABSENT)
    return {**sizes, "gdn.layers": tuple(_read_layers(config, said))}


def _read_layers(config: Config, said: Config) -> list[bool]:
    listed, number = listed_layers(config, KINDS), layers(config)
    if listed is not None:
        return listed
    if not all(key in said for key in LISTS):
        return [not layer or layer % 4 != 0 for layer in range(number)]  # from 0; lists count from 1
    return shared_out(said, number)


def _write_kda(model: ModelShape) -> Config:
    return {"linear_attn_config": {**write_sizes(model.gdn), **layer_lists(model)}} if model.gdn else {}


ARCHITECTURE = Architecture(
    model_types={"kimi_linear": "KimiLinearForCausalLM"},
    rows=model_rows(
        *SEPARATE_NORM,
        *either(in_memory(_KDA), _KDA),
        *only_in("attention", LATENT_ATTENTION),
        *MLP_NORM,
        Either(MLP, renamed(MLP, _SPARSE)),
        *MOE_NORM,
        Either((*renamed(_BESIDE, _SPARSE), *EXPERTS), (*_BESIDE, *FUSED), second_is="in memory"),
    ),
    config=(
        *common(published=True, number=256, group_counts=(1, 1), scaling=2.446),
        Rule(("layer_types", "linear_attn_config", *BESIDE.values()), _read_kda, _write_kda),
        Rule((), lambda config: {"rope_layers": (False,) * layers(config)}),
        experts_by_list(dense=1, key="first_k_dense_replace"),
        Only("mla_use_nope", True),
        Only("moe_layer_freq", 1),
        Only("moe_router_activation_func", "sigmoid"),
        Only("use_grouped_topk", True),
        Only("num_nextn_predict_layers", 0),
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
    ),
    aliases=(),
)
