"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere, tied embeddings.

Traps: matrices are stored `[in, out]` (Conv1D), and `c_attn` is all of q, then k, then v. The files of the Hub leave
out the prefix `transformer.`.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import (
    GELU_TANH,
    VOCABULARY,
    Always,
    Config,
    Fields,
    Key,
    Only,
    Rule,
    Synonyms,
    activation,
    layers,
    size,
    tied,
)
from precisionctl.architectures.head_rearrangements import QKV
from precisionctl.architectures.param_map import Alias, Architecture, Either, Row, renamed, when
from precisionctl.architectures.rearrangements import GAMMA, SAME, Joined, Transposed
from precisionctl.architectures.rearrangements import VOCABULARY as PADDED
from precisionctl.model_shape import ModelShape
from precisionctl.param import COLUMNS, ROWS

PARAMETERS = (
    Row(
        "transformer.wte.weight",
        "embedding.word_embeddings.weight",
        ("padded_vocab_size", "hidden_size"),
        PADDED,
        ROWS,
    ),
    Row(
        "transformer.wpe.weight",
        "embedding.position_embeddings.weight",
        ("max_position_embeddings", "hidden_size"),
    ),
    Row(
        "transformer.h.{layer}.ln_1.weight",
        "decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight",
        ("hidden_size",),
        GAMMA,
    ),
    Row(
        "transformer.h.{layer}.ln_1.bias",
        "decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_bias",
        ("hidden_size",),
    ),
    Row(
        "transformer.h.{layer}.attn.c_attn.weight",
        "decoder.layers.{layer}.self_attention.linear_qkv.weight",
        ("qkv_size", "hidden_size"),
        Transposed(Joined(QKV)),
        ROWS,
        gemm=True,
    ),
    Row(
        "transformer.h.{layer}.attn.c_attn.bias",
        "decoder.layers.{layer}.self_attention.linear_qkv.bias",
        ("qkv_size",),
        Joined(QKV),
        ROWS,
    ),
    Row(
        "transformer.h.{layer}.attn.c_proj.weight",
        "decoder.layers.{layer}.self_attention.linear_proj.weight",
        ("hidden_size", "projection_size"),
        Transposed(SAME),
        COLUMNS,
        gemm=True,
    ),
    Row(
        "transformer.h.{layer}.attn.c_proj.bias",
        "decoder.layers.{layer}.self_attention.linear_proj.bias",
        ("hidden_size",),
    ),
    Row(
        "transformer.h.{layer}.ln_2.weight",
        "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight",
        ("hidden_size",),
        GAMMA,
    ),
    Row(
        "transformer.h.{layer}.ln_2.bias",
        "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_bias",
        ("hidden_size",),
    ),
    Row(
        "transformer.h.{layer}.mlp.c_fc.weight",
        "decoder.layers.{layer}.mlp.linear_fc1.weight",
        ("fc1_size", "hidden_size"),
        Transposed(SAME),
        ROWS,
        gemm=True,
    ),
    Row(
        "transformer.h.{layer}.mlp.c_fc.bias",
        "decoder.layers.{layer}.mlp.linear_fc1.bias",
        ("fc1_size",),
        parallel=ROWS,
    ),
    Row(
        "transformer.h.{layer}.mlp.c_proj.weight",
        "decoder.layers.{layer}.mlp.linear_fc2.weight",
        ("hidden_size", "ffn_hidden_size"),
        Transposed(SAME),
        COLUMNS,
        gemm=True,
    ),
    Row(
        "transformer.h.{layer}.mlp.c_proj.bias",
        "decoder.layers.{layer}.mlp.linear_fc2.bias",
        ("hidden_size",),
    ),
    Row("transformer.ln_f.weight", "decoder.final_layernorm.weight", ("hidden_size",), GAMMA),
    Row("transformer.ln_f.bias", "decoder.final_layernorm.bias", ("hidden_size",)),
)


OF_LINEARS = tuple(
    row if row.rearrangement in (PADDED, GAMMA) else replace(row, rearrangement=SAME) for row in PARAMETERS
)
"""The same of models whose matrices are `[out, in]`, and `c_attn` as Megatron has it."""


def sizes(number: str, hidden: str, heads: str, inner: str | None, absent: int | None = None) -> Rule:
    """The keys of layers, channels, heads, each with a key of its own, and an MLP's channels: four times as many where
    null stands for them, which is also what stands for a key that is not there, but for `absent`; and where the family
    has no such key."""

    def read(config: Config, where: object) -> Fields:
        count, channels = size(config, heads, where), size(config, hidden, where)
        width = config.get(inner, absent) if inner else None
        return {
            "num_layers": layers(config, where, number),
            "hidden_size": channels,
            "ffn_hidden_size": 4 * channels if width is None else width,
            "num_attention_heads": count,
            "num_query_groups": count,
            "kv_channels": channels // count,
        }

    def write(model: ModelShape) -> Config:
        return {
            number: model.num_layers,
            hidden: model.hidden_size,
            **({inner: model.ffn_hidden_size} if inner else {}),
            heads: model.num_attention_heads,
        }

    return Rule((number, hidden, heads, *([inner] if inner else [])), read, write)


ACTIVATION = activation("activation_function", {"gelu_new": "gelu_tanh", **GELU_TANH, "gelu": "gelu"}, "gelu_new")

SIZES = (
    sizes("n_layer", "n_embd", "n_head", "n_inner"),
    Key("max_position_embeddings", "n_positions"),
    Synonyms(
        {
            "num_hidden_layers": "n_layer",
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        }
    ),
    VOCABULARY,
    ACTIVATION,
    Always("gated_linear_unit", False),
    Always("normalization", "LayerNorm"),
    Key("norm_epsilon", "layer_norm_epsilon", 1e-5),
)

ARCHITECTURE = Architecture(
    model_types={"gpt2": "GPT2LMHeadModel"},
    rows=(
        Either(PARAMETERS, renamed(PARAMETERS, {"transformer.": ""})),
        Row(
            "lm_head.weight",
            "output_layer.weight",
            ("padded_vocab_size", "hidden_size"),
            PADDED,
            ROWS,
            present=when("untied_embeddings"),
        ),
    ),
    config=(
        *SIZES,
        Always("position_embedding", "learned_absolute"),
        Always("qkv_bias", True),
        Always("proj_bias", True),
        Always("mlp_bias", True),
        Only("scale_attn_weights", True),
        Only("scale_attn_by_inverse_layer_idx", False),
        Only("add_cross_attention", False),
        tied(True),
    ),
    aliases=(
        Alias("lm_head.weight", of="transformer.wte.weight", switch="tied_embeddings"),
        Alias("lm_head.weight", of="wte.weight", switch="tied_embeddings"),
    ),
    derived=("*h.{layer}.attn.bias", "*h.{layer}.attn.masked_bias"),
)
