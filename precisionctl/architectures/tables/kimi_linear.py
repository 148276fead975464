"""Kimi Linear: Kimi delta attention, in every fourth layer latent attention without positions, and DeepSeek-V3's
experts.

Traps: published files number layers from 1; name experts, and what is beside them, as Mixtral does, but not dense MLPs,
of which transformers saves the same name; and have A_log in four dimensions. config.json says scalings and bases of
rotary embeddings that nothing turns by.
"""

from collections.abc import Mapping

from precisionctl.architectures.config_keys import Config, Fields, Key, Only, Rule, layers, size
from precisionctl.architectures.config_layers import listed_layers
from precisionctl.architectures.param_map import Architecture, Either, Row, only_in, renamed
from precisionctl.architectures.rearrangements import Squeezed
from precisionctl.architectures.shared.deepseek_keys import experts_by_list
from precisionctl.architectures.shared.deepseek_rows import LATENT_ATTENTION, ROUTING
from precisionctl.architectures.shared.delta_net_keys import KINDS
from precisionctl.architectures.shared.kda_keys import LISTS, common, layer_lists, shared_out
from precisionctl.architectures.shared.kda_rows import either, in_memory, kda
from precisionctl.architectures.shared.llama_rows import MLP, MLP_NORM, SEPARATE_NORM, model_rows
from precisionctl.architectures.shared.moe_rows import FUSED, MOE_NORM, experts
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape

_KDA = kda(low_rank=True, a_log=Squeezed((1, 1, -1, 1)))
_SPARSE = {".mlp.": ".block_sparse_moe."}
_BESIDE = tuple(row for row in ROUTING if isinstance(row, Row))
EXPERTS = experts(*(f"model.layers.{{layer}}.block_sparse_moe.experts.{{expert}}.w{n}.weight" for n in (1, 3, 2)))

_SIZES = {  # field, in linear_attn_config, beside it, and what the class takes for it
    "gdn.key_head_dim": ("head_dim", "linear_head_dim", 128),
    "gdn.num_key_heads": ("num_heads", "linear_num_heads", 32),
    "gdn.conv_kernel_dim": ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
}


def _read_kda(config: Config, where: object) -> Fields:
    said = config.get("linear_attn_config", {})
    if not isinstance(said, Mapping):
        raise DamagedCheckpoint(f"linear_attn_config is {shown(said)}, not an object", where=where)
    for key in said.keys() - {*LISTS, *(inner for inner, _, _ in _SIZES.values())}:
        what = f"no kimi_linear known here has linear_attn_config.{key}={shown(said[key])}"
        raise UnknownArchitecture(what, where=where)
    sizes = {
        field: size({inner: config.get(beside, absent)} | dict(said), inner, where)
        for field, (inner, beside, absent) in _SIZES.items()
    }
    rank, heads = sizes["gdn.key_head_dim"], sizes["gdn.num_key_heads"]
    same = {"gdn.kda": True, "gdn.kda_lora_rank": rank, "gdn.value_head_dim": rank, "gdn.num_value_heads": heads}
    return {**sizes, **same, "gdn.layers": tuple(_read_layers(config, said, where))}


def _read_layers(config: Config, said: Config, where: object) -> list[bool]:
    listed, number = listed_layers(config, KINDS, where), layers(config, where)
    if listed is not None:
        return listed
    if not all(key in said for key in LISTS):
        return [not layer or layer % 4 != 0 for layer in range(number)]  # from 0; lists count from 1
    return shared_out(said, number, where)


def _write_kda(model: ModelShape) -> Config:
    if model.gdn is None:
        return {}
    sizes = (model.gdn.key_head_dim, model.gdn.num_key_heads, model.gdn.conv_kernel_dim)
    return {
        "linear_attn_config": {
            **{inner: value for (inner, _, _), value in zip(_SIZES.values(), sizes, strict=True)},
            **layer_lists(model),
        }
    }


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
        Rule(
            ("layer_types", "linear_attn_config", *(beside for _, beside, _ in _SIZES.values())), _read_kda, _write_kda
        ),
        Rule((), lambda config, where: {"rope_layers": (False,) * layers(config, where)}),
        experts_by_list(dense=1, key="first_k_dense_replace"),
        Only("mla_use_nope", True),
        Only("moe_layer_freq", 1),
        Only("moe_router_activation_func", "sigmoid"),
        Only("use_grouped_topk", True),
        Only("num_nextn_predict_layers", 0),
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
    ),
)
