"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere, tied embeddings.

Traps: matrices are stored `[in, out]` (Conv1D), and `c_attn` is all of q, then k, then v. The files of the Hub leave
out the prefix `transformer.`.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.head_rearrangements import QKV
from precisionctl.architectures.param_map import Alias, Architecture, Either, Row, renamed
from precisionctl.architectures.rearrangements import Joined, Transposed
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.model.model_shape import ModelShape

NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.layers.": "transformer.h.",
    ".input_layernorm.": ".ln_1.",
    ".self_attn.query_key_value.": ".attn.c_attn.",
    ".self_attn.o_proj.": ".attn.c_proj.",
    ".post_attention_layernorm.": ".ln_2.",
    ".mlp.up_proj.": ".mlp.c_fc.",
    ".mlp.down_proj.": ".mlp.c_proj.",
    "model.norm.": "transformer.ln_f.",
}
_POSITIONS = Row(
    "transformer.wpe.weight", "embedding.position_embeddings.weight", ("max_position_embeddings", "hidden_size")
)


def body(qkv: tuple[Row, ...], *positions: Row) -> tuple[Row, ...]:
    """The rows of all but the output layer, under Llama's names: LayerNorms, and MLPs without a gate."""
    block = (*llama.ATTENTION_LAYER_NORM, *qkv, *llama.PROJ, *llama.MLP_LAYER_NORM, *llama.UNGATED_MLP)
    return (*llama.EMBEDDING, *positions, *block, *llama.FINAL_LAYER_NORM)


OF_LINEARS = renamed(body(llama.JOINED_QKV, _POSITIONS), NAMES)
"""The rows of models whose matrices are `[out, in]`, and `c_attn` as Megatron has it."""


def _as_stored(row: Row) -> Row:
    """A row of `OF_LINEARS` as GPT-2 has it."""
    stored = Joined(QKV) if ".attn.c_attn." in row.hf[0] else row.rearrangement
    return replace(row, rearrangement=Transposed(stored) if row.gemm else stored)


_PARAMETERS = tuple(map(_as_stored, OF_LINEARS))


def sizes(number: str, hidden: str, heads: str, inner: str | None, absent: int | None = None) -> keys.Rule:
    """Numbers of layers, of channels and of heads, by the keys `number`, `hidden` and `heads`, and an MLP's channels by
    the key `inner`, which the family may lack (None); `absent` where it is not in config.json. They are four times
    `hidden` where nothing says them: without the key, or where it, or `absent`, is null."""

    def read(config: keys.Config) -> keys.Fields:
        count, channels = keys.size(config, heads), keys.size(config, hidden)
        inner_size = 4 * channels
        if inner and config.get(inner, absent) is not None:
            inner_size = keys.size(config, inner, absent=absent)
        return {
            "num_layers": keys.layers(config, number),
            "hidden_size": channels,
            "ffn_hidden_size": inner_size,
            "num_attention_heads": count,
            "num_query_groups": count,
            "kv_channels": channels // count,
        }

    def write(model: ModelShape) -> keys.Config:
        return {
            number: model.num_layers,
            hidden: model.hidden_size,
            **({inner: model.ffn_hidden_size} if inner else {}),
            heads: model.num_attention_heads,
        }

    return keys.Rule((number, hidden, heads, *([inner] if inner else [])), read, write)


ACTIVATION = keys.activation(
    "activation_function", {"gelu_new": "gelu_tanh", **keys.GELU_TANH, "gelu": "gelu"}, "gelu_new"
)

SIZES = (
    sizes("n_layer", "n_embd", "n_head", "n_inner"),
    keys.Key("max_position_embeddings", "n_positions"),
    keys.synonyms(
        {
            "num_hidden_layers": "n_layer",
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        }
    ),
    keys.VOCABULARY,
    ACTIVATION,
    keys.always("gated_linear_unit", False),
    keys.always("normalization", "LayerNorm"),
    keys.Key("norm_epsilon", "layer_norm_epsilon", 1e-5),
)

ARCHITECTURE = Architecture(
    model_types={"gpt2": "GPT2LMHeadModel"},
    rows=(Either(_PARAMETERS, other=renamed(_PARAMETERS, {"transformer.": ""})), *llama.OUTPUT),
    config=(
        *SIZES,
        keys.always("position_embedding", "learned_absolute"),
        *keys.ALL_BIASES,
        keys.only("scale_attn_weights", True),
        keys.only("scale_attn_by_inverse_layer_idx", False),
        keys.only("add_cross_attention", False),
        keys.tied(True),
    ),
    aliases=(
        Alias("lm_head.weight", of="transformer.wte.weight", switch="tied_embeddings"),
        Alias("lm_head.weight", of="wte.weight", switch="tied_embeddings"),
    ),
    derived=("*h.{layer}.attn.bias", "*h.{layer}.attn.masked_bias"),
)
