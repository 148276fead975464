"""OLMo Hybrid: in three of four layers a gated delta net in the place of OLMo 3's attention, which has no positions.

Traps: layers with a delta net have norms before their blocks, as a Llama has them, and the others OLMo's behind them;
`post_attention_layernorm` is the one before the MLP in the former, and that behind attention in the latter.
transformers 5.24 saves these norms under other names than published ones, and has the three convolutions in one, which
it saves in thirds, though values have more channels than keys. Learning rates are up to 2. The norm of what a delta net
gives has an epsilon of its own, which no key says. Published models have no rotary embeddings, which a null
`rope_theta` says; a null `rope_parameters` alone says it to nobody.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import all_but_every, listed_layers, write_layer_types
from precisionctl.architectures.param_map import Architecture, Either, Row, only_in, renamed
from precisionctl.architectures.rearrangements import DELTA_NET_CONV, DELTA_NET_IN_PROJ, THIRDS
from precisionctl.architectures.rope import KEYS, rope, rotary_parameters
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.shared.delta_net_keys import KINDS
from precisionctl.architectures.shared.delta_net_rows import delta_net
from precisionctl.architectures.tables.olmo2 import NORM_OVER_HEADS
from precisionctl.errors import UnknownArchitecture

_IN_PROJ = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
_NAMES = {".linear_attn.norm.": ".linear_attn.o_norm.", ".linear_attn.out_proj.": ".linear_attn.o_proj."}
_SAVED = {".input_layernorm.": ".attention_layer_norm.", ".post_attention_layernorm.": ".feedforward_layer_norm."}
"""By transformers, which gives the second name to the norm behind attention, too."""


def _spelled(row: Row) -> Row | Either:
    if row.hf == ("model.layers.{layer}.linear_attn.conv1d.weight",):
        apart = tuple(row.hf[0].replace("conv1d", f"{part}_conv1d") for part in "qkv")
        published, saved = (replace(row, names=apart, rearrangement=by) for by in (DELTA_NET_CONV, THIRDS))
        return Either((published,), in_memory=(row,), other=(saved,), only_read=True)
    saved = row.renamed(_SAVED)
    return row if saved == row else Either((row,), other=(saved,), only_read=True)


_NETS = delta_net(DELTA_NET_IN_PROJ, *_IN_PROJ, values=_IN_PROJ[4:])
_LAYERS = (
    *renamed((row for row in _NETS if row.layers == "gdn"), _NAMES),
    *only_in("gdn", llama.MLP_NORM),
    *only_in(
        "attention",
        (*llama.QKV_LINEAR, *llama.QK_NORMS_OVER_HEADS, *llama.PROJ, *llama.POST_ATTENTION_NORM, *llama.POST_MLP_NORM),
    ),
    *llama.MLP,
)


_UNLISTED = all_but_every(4)


def _read_layers(config: keys.Config) -> keys.Fields:
    listed = listed_layers(config, KINDS)
    if listed is None:
        listed = _UNLISTED(config, keys.layers(config))
        listed[-1] = listed[-1] and not all(listed)  # one has attention
    return {"gdn.layers": tuple(listed)}


_SIZES = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")


def _read_sizes(config: keys.Config) -> keys.Fields:
    said = {name: config[name] for name in _SIZES if config.get(name) is not None}
    said = dict.fromkeys(_SIZES[:2], keys.size(config, "num_attention_heads")) | said
    heads = keys.size(said, _SIZES[0])
    said = {_SIZES[2]: int(0.75 * keys.size(config, "hidden_size") / heads)} | said
    said = {_SIZES[3]: 2 * keys.size(said, _SIZES[2])} | said
    return {f"gdn.{name.removeprefix('linear_')}": keys.size(said, name) for name in _SIZES}


_ROPE = rope()


def _read_rope(config: keys.Config) -> keys.Fields:
    parameters = rotary_parameters({**config, "rope_theta": 1.0}, 1.0)
    if parameters.get("rope_theta", config.get("rope_theta", 1.0)) is None:
        return {"rope_layers": (False,) * keys.layers(config)}
    if config.get("rope_parameters", {}) is None and not parameters and "rope_theta" not in config:
        raise UnknownArchitecture(
            "rope_parameters is null, which is no rotary embedding to vLLM, and one of base 10000 to transformers 5.24",
            do="Say `rope_theta` beside it: null for a model without rotary embeddings, as Ai2's are.",
        )
    return _ROPE.read(config)


ARCHITECTURE = Architecture(
    model_types={"olmo_hybrid": "OlmoHybridForCausalLM"},
    rows=llama.model_rows(*map(_spelled, _LAYERS)),
    config=(
        *keys.SIZES,
        keys.HEADS,
        keys.ATTENTION_BIAS,
        keys.SILU,
        *NORM_OVER_HEADS,
        keys.always("pre_layernorms", False),
        keys.always("post_layernorms", True),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        keys.Rule(("layer_types",), _read_layers, write_layer_types),
        keys.Rule(
            _SIZES,
            _read_sizes,
            lambda model: (
                {name: getattr(model.gdn, name.removeprefix("linear_")) for name in _SIZES} if model.gdn else {}
            ),
        ),
        keys.Key("gdn.conv_kernel_dim", "linear_conv_kernel_dim", 4),
        keys.Key("gdn.allow_neg_eigval", "linear_allow_neg_eigval", True),
        keys.only("linear_use_gate", True),
        keys.always("gdn.norm_epsilon", 1e-5),
        keys.Rule(
            KEYS,
            _read_rope,
            lambda model: (
                {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
                if model.rope_layers
                else _ROPE.write(model)
            ),
        ),
        keys.tied(False),
    ),
    names_by="this project",
)
