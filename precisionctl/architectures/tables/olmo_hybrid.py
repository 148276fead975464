"""OLMo Hybrid: in three of four layers a gated delta net in the place of OLMo 3's attention, which has no positions.

Traps: layers with a delta net have norms before their blocks, as a Llama has them, and the others OLMo's behind them;
`post_attention_layernorm` is the one before the MLP in the former, and that behind attention in the latter.
transformers 5.24 saves these norms under other names than published ones, and has the three convolutions in one, which
it saves in thirds, though values have more channels than keys. Learning rates are up to 2. The norm of what a delta net
gives has an epsilon of its own, which no key says. Published models have no rotary embeddings, which a null
`rope_theta` says; a null `rope_parameters` alone says it to nobody.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import (
    ATTENTION_BIAS,
    HEADS,
    SILU,
    SIZES,
    Always,
    Config,
    Fields,
    Key,
    Only,
    Rule,
    layers,
    size,
    tied,
)
from precisionctl.architectures.config_layers import all_but_every, listed_layers
from precisionctl.architectures.param_map import Architecture, Either, Row, only_in, renamed
from precisionctl.architectures.rearrangements import DELTA_NET_CONV, DELTA_NET_IN_PROJ, THIRDS
from precisionctl.architectures.rope import KEYS, rope, rotary_parameters
from precisionctl.architectures.shared.delta_net_keys import KINDS, write_layers
from precisionctl.architectures.shared.delta_net_rows import delta_net
from precisionctl.architectures.shared.gemma_rows import POST_ATTENTION_NORM, POST_MLP_NORM
from precisionctl.architectures.shared.llama_rows import (
    MLP,
    MLP_NORM,
    PROJ,
    QK_NORMS_OVER_HEADS,
    QKV_LINEAR,
    model_rows,
)
from precisionctl.architectures.tables.olmo2 import NORM_OVER_HEADS
from precisionctl.errors import UnknownArchitecture
from precisionctl.model.model_shape import ModelShape

_IN_PROJ = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
_NAMES = {".linear_attn.norm.": ".linear_attn.o_norm.", ".linear_attn.out_proj.": ".linear_attn.o_proj."}
_SAVED = {".input_layernorm.": ".attention_layer_norm.", ".post_attention_layernorm.": ".feedforward_layer_norm."}
"""By transformers, which gives the second name to the norm behind attention, too."""


def _spelled(row: Row) -> Row | Either:
    if row.hf == ("model.layers.{layer}.linear_attn.conv1d.weight",):
        apart = tuple(row.hf[0].replace("conv1d", f"{part}_conv1d") for part in "qkv")
        published, saved = (replace(row, names=apart, rearrangement=by) for by in (DELTA_NET_CONV, THIRDS))
        return Either((published,), (row,), also=(saved,), only_read=True, second_is="in memory")
    saved = row.renamed(_SAVED)
    return row if saved == row else Either((row,), (saved,), only_read=True)


_NETS = delta_net(DELTA_NET_IN_PROJ, *_IN_PROJ, values=_IN_PROJ[4:])
_LAYERS = (
    *renamed((row for row in _NETS if row.layers == "gdn"), _NAMES),
    *only_in("gdn", MLP_NORM),
    *only_in("attention", (*QKV_LINEAR, *QK_NORMS_OVER_HEADS, *PROJ, *POST_ATTENTION_NORM, *POST_MLP_NORM)),
    *MLP,
)


_UNLISTED = all_but_every(4)


def _read_layers(config: Config) -> Fields:
    listed = listed_layers(config, KINDS)
    if listed is None:
        listed = _UNLISTED(config, layers(config))
        listed[-1] = listed[-1] and not all(listed)  # one has attention
    return {"gdn.layers": tuple(listed)}


_SIZES = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")


def _read_sizes(config: Config) -> Fields:
    said = {name: config[name] for name in _SIZES if config.get(name) is not None}
    said = dict.fromkeys(_SIZES[:2], size(config, "num_attention_heads")) | said
    keys = size(said, _SIZES[0])
    said = {_SIZES[2]: int(0.75 * size(config, "hidden_size") / keys)} | said
    said = {_SIZES[3]: 2 * size(said, _SIZES[2])} | said
    return {f"gdn.{name.removeprefix('linear_')}": said[name] for name in _SIZES}


def _write_sizes(model: ModelShape) -> Config:
    return {name: getattr(model.gdn, name.removeprefix("linear_")) for name in _SIZES} if model.gdn else {}


_ROPE = rope()


def _read_rope(config: Config) -> Fields:
    parameters = rotary_parameters({**config, "rope_theta": 1.0}, 1.0)
    if parameters.get("rope_theta", config.get("rope_theta", 1.0)) is None:
        return {"rope_layers": (False,) * layers(config)}
    if config.get("rope_parameters", {}) is None and not parameters and "rope_theta" not in config:
        raise UnknownArchitecture(
            "rope_parameters is null, which is no rotary embedding to vLLM, and one of base 10000 to transformers 5.24",
            do="Say `rope_theta` beside it: null for a model without rotary embeddings, as Ai2's are.",
        )
    return _ROPE.read(config)


def _write_rope(model: ModelShape) -> Config:
    if model.rope_layers:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    return _ROPE.write(model)


ARCHITECTURE = Architecture(
    model_types={"olmo_hybrid": "OlmoHybridForCausalLM"},
    rows=model_rows(*map(_spelled, _LAYERS)),
    config=(
        *SIZES,
        HEADS,
        ATTENTION_BIAS,
        SILU,
        *NORM_OVER_HEADS,
        Always("pre_layernorms", False),
        Always("post_layernorms", True),
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
        Rule(("layer_types",), _read_layers, write_layers),
        Rule(_SIZES, _read_sizes, _write_sizes),
        Key("gdn.conv_kernel_dim", "linear_conv_kernel_dim", 4),
        Key("gdn.allow_neg_eigval", "linear_allow_neg_eigval", True),
        Only("linear_use_gate", True),
        Always("gdn.norm_epsilon", 1e-5),
        Rule(KEYS, _read_rope, _write_rope),
        tied(False),
    ),
    names_by="this project",
)
