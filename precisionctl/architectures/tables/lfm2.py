"""LFM2: in most layers a short gated convolution in the place of attention. Neither Megatron-Core nor Megatron-Bridge
has one: its parameters have the names that a gated delta net's have there.

Traps: `block_ff_dim` is another word for `intermediate_size`, and wins; an MLP has fewer channels than either says,
unless `block_auto_adjust_ff_dim` is off. `tie_embedding` is another word for `tie_word_embeddings`, and wins. The last
norm is called `embedding_norm`. Exports leave the projections around convolutions as they are, because vLLM's layer
takes no codes for them.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import listed_layers, numbered_layers, write_layer_types
from precisionctl.architectures.param_map import Architecture, Either, Row, only_in, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.model.model_parts import real
from precisionctl.param import COLUMNS, ROWS, TWICE_GATED_ROWS

_HF, _MEGATRON = "model.layers.{layer}.conv.", "decoder.layers.{layer}.self_attention."

NAMES = {
    ".input_layernorm.": ".operator_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".self_attn.q_norm.": ".self_attn.q_layernorm.",
    ".self_attn.k_norm.": ".self_attn.k_layernorm.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
}

CONVOLUTION = (
    *renamed(llama.ATTENTION_NORM, {}, {".linear_qkv.": ".in_proj."}),
    Row(
        f"{_HF}in_proj.weight",
        f"{_MEGATRON}in_proj.weight",
        ("short_conv_size", "hidden_size"),
        parallel=TWICE_GATED_ROWS,
        gemm=True,
        values=(f"{_HF}in_proj.weight",),
    ),
    Row(f"{_HF}conv.weight", f"{_MEGATRON}conv1d.weight", ("hidden_size", 1, "short_conv.kernel_dim"), parallel=ROWS),
    Row(
        f"{_HF}out_proj.weight",
        f"{_MEGATRON}out_proj.weight",
        ("hidden_size", "hidden_size"),
        parallel=COLUMNS,
        gemm=True,
        values=(f"{_HF}out_proj.weight",),
    ),
)

ENDING = renamed(llama.FINAL_NORM, {"model.norm.": "model.embedding_norm."})


def rows(*experts: Row | Either) -> tuple[Row | Either, ...]:
    """All; `experts` are those of layers that have them in the place of an MLP."""
    blocks = (
        *only_in("conv", CONVOLUTION),
        *only_in("attention", (*llama.ATTENTION_NORM, *llama.ATTENTION)),
        *llama.MLP_NORM,
        *llama.MLP,
    )
    return llama.model_rows(*renamed(blocks, NAMES), *experts, ending=ENDING)


KINDS = {"conv": True, "full_attention": False}


def _read_layers(config: keys.Config) -> keys.Fields:
    listed, number = listed_layers(config, KINDS), keys.layers(config)
    if listed is None and config.get("full_attn_idxs") is not None:
        attending = numbered_layers(config["full_attn_idxs"], "full_attn_idxs")
        listed = [layer not in attending for layer in range(number)]
    return {"short_conv.layers": tuple(listed or [False] * number)}


def _read_channels(config: keys.Config) -> keys.Fields:
    said = {"intermediate_size": 12288, **config}
    channels = keys.size(said, "block_ff_dim" if "block_ff_dim" in said else "intermediate_size")
    if keys.is_on(config, "block_auto_adjust_ff_dim", True):
        multiplier = real(config.get("block_ffn_dim_multiplier", 1.0), "block_ffn_dim_multiplier")
        multiple = keys.size(config, "block_multiple_of", absent=256)
        channels = multiple * -(-int(multiplier * int(2 * channels / 3)) // multiple)
    return {"ffn_hidden_size": channels}


def _read_tied(config: keys.Config) -> keys.Fields:
    key = "tie_embedding" if "tie_embedding" in config else "tie_word_embeddings"
    return {"tied_embeddings": keys.is_on(config, key, absent=True)}


COMMON: tuple[keys.Entry, ...] = (
    keys.LAYERS,
    keys.Key("max_position_embeddings", "max_position_embeddings", 128000),
    keys.VOCABULARY,
    keys.heads(num_attention_heads=32, num_key_value_heads=8),
    keys.always("qk_layernorm", True),
    keys.Key("short_conv.kernel_dim", "conv_L_cache", 3),
    keys.only("conv_bias", False),
    keys.Key("norm_epsilon", "norm_eps", 1e-5),
    rope(1e6),
    keys.Rule(
        ("tie_embedding", "tie_word_embeddings"),
        _read_tied,
        lambda model: {"tie_word_embeddings": model.tied_embeddings},
    ),
)

_WIDTHS = keys.synonyms({"block_dim": "hidden_size", "conv_dim": "hidden_size"})
_CHANNELS = ("block_auto_adjust_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier")

ARCHITECTURE = Architecture(
    model_types={"lfm2": "Lfm2ForCausalLM"},
    rows=rows(),
    config=(
        *COMMON,
        keys.Key("hidden_size", "hidden_size", 2560),
        keys.Rule(
            ("intermediate_size", "block_ff_dim", *_CHANNELS),
            _read_channels,
            lambda model: {
                **dict.fromkeys(("intermediate_size", "block_ff_dim"), model.ffn_hidden_size),
                "block_auto_adjust_ff_dim": False,
            },
        ),
        keys.Rule(("layer_types", "full_attn_idxs"), _read_layers, write_layer_types),
        keys.Rule(  # by which vLLM goes
            _WIDTHS.keys, _WIDTHS.read, lambda model: dict.fromkeys(_WIDTHS.keys, model.hidden_size)
        ),
        keys.synonyms({"num_heads": "num_attention_heads"}),
        keys.synonyms({"block_norm_eps": "norm_eps"}),
        keys.only("block_use_swiglu", True),
        keys.only("use_pos_enc", True),
    ),
    names_by="this project",
)
