"""Kimi Linear: Kimi delta attention, in every fourth layer latent attention without positions, and DeepSeek-V3's
experts.

Traps: published files number layers from 1; name experts, and what is beside them, as Mixtral does, but not dense MLPs,
of which transformers saves the same name; and have A_log in four dimensions. config.json says scalings and bases of
rotary embeddings that nothing turns by.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import listed_layers
from precisionctl.architectures.param_map import Architecture, Either, Row, only_in, published_or_in_memory, renamed
from precisionctl.architectures.rearrangements import Squeezed
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama, moe_rows as moe
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
from precisionctl.architectures.shared.kda_rows import in_memory, kda

_KDA = kda(low_rank=True, a_log=Squeezed((1, 1, -1, 1)))
_SPARSE = {".mlp.": ".block_sparse_moe."}
_BESIDE = tuple(row for row in deepseek_rows.ROUTING if isinstance(row, Row))
EXPERTS = moe.experts("model.layers.{layer}.block_sparse_moe.experts")

_ABSENT = {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}
"""What its class takes for sizes that are not there."""


def _read_kda(config: keys.Config) -> keys.Fields:
    said = checked(config.get("linear_attn_config", {}), "kimi_linear")
    sizes = read_sizes(said, config, _ABSENT)
    of_kda = listed_layers(config, KINDS)
    if of_kda is None:
        number, listed = keys.layers(config), all(key in said for key in LISTS)
        unlisted = [not layer or layer % 4 != 0 for layer in range(number)]  # from 0; lists count from 1
        of_kda = shared_out(said, number) if listed else unlisted
    return {**sizes, "gdn.layers": tuple(of_kda)}


ARCHITECTURE = Architecture(
    model_types={"kimi_linear": "KimiLinearForCausalLM"},
    rows=llama.model_rows(
        *llama.SEPARATE_NORM,
        *published_or_in_memory(in_memory(_KDA), _KDA),
        *only_in("attention", deepseek_rows.LATENT_ATTENTION),
        *llama.MLP_NORM,
        Either(llama.MLP, other=renamed(llama.MLP, _SPARSE)),
        *moe.MOE_NORM,
        Either((*renamed(_BESIDE, _SPARSE), *EXPERTS), in_memory=(*_BESIDE, *moe.FUSED)),
    ),
    config=(
        *common(published=True, number=256, group_counts=(1, 1), scaling=2.446),
        keys.Rule(
            ("layer_types", "linear_attn_config", *BESIDE.values()),
            _read_kda,
            lambda model: {"linear_attn_config": {**write_sizes(model.gdn), **layer_lists(model)}} if model.gdn else {},
        ),
        keys.in_all_layers("rope_layers", False),
        deepseek_keys.experts_by_list(dense=1, key="first_k_dense_replace"),
        keys.only("mla_use_nope", True),
        keys.only("moe_layer_freq", 1),
        keys.only("moe_router_activation_func", "sigmoid"),
        keys.only("use_grouped_topk", True),
        keys.only("num_nextn_predict_layers", 0),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
    ),
    aliases=(),
)
