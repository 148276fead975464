"""OPT and Galactica: Llama's projections with biases, LayerNorms, learned positions, an MLP of ReLUs.

Traps: the first position of a text is row 2 of the table of positions; rows 0 and 1, which no text reads, are the last
ones in Megatron. A layer's `final_layer_norm` is the one before its MLP. Files of the body alone leave out the prefix
`model.`. Of OPT-350M norms stand behind blocks, and embeddings have a width of their own: refused by those names.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Alias, Architecture, Either, Row, renamed
from precisionctl.architectures.rearrangements import FIRST_TWO_LAST
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.tables.gpt2 import body, sizes
from precisionctl.errors import UnknownArchitecture, shown

_NAMES = {
    "model.layers.": "model.decoder.layers.",
    "model.norm.": "model.decoder.final_layer_norm.",
    "model.embed_tokens.": "model.decoder.embed_tokens.",
    ".input_layernorm.": ".self_attn_layer_norm.",
    ".post_attention_layernorm.": ".final_layer_norm.",
    ".o_proj.": ".out_proj.",
    ".mlp.up_proj.": ".fc1.",
    ".mlp.down_proj.": ".fc2.",
}
_POSITIONS = Row(
    "model.decoder.embed_positions.weight",
    "embedding.position_embeddings.weight",
    ("position_rows", "hidden_size"),
    FIRST_TWO_LAST,
)
_BODY = (
    *renamed(body(llama.QKV_LINEAR), _NAMES),
    _POSITIONS,
)


_UNREAD = 2


def _read_width(config: keys.Config) -> keys.Fields:
    width = config.get("word_embed_proj_dim")
    if width not in (None, keys.size(config, "hidden_size")):
        what = f"no opt known here has word_embed_proj_dim={shown(width)}"
        raise UnknownArchitecture(what, do="Its table was made for that of hidden_size.")
    return {}


ARCHITECTURE = Architecture(
    model_types={"opt": "OPTForCausalLM"},
    behind={"q_proj": "v_proj", "layers": "final_layer_norm"},
    rows=(Either(_BODY, other=renamed(_BODY, {"model.decoder.": "decoder."})), *llama.OUTPUT),
    config=(
        sizes("num_hidden_layers", "hidden_size", "num_attention_heads", "ffn_dim", absent=3072),
        keys.Rule(
            ("max_position_embeddings",),
            lambda config: {"max_position_embeddings": keys.size(config, "max_position_embeddings", absent=2048)},
            lambda model: {"max_position_embeddings": model.position_rows - _UNREAD},  # Megatron counts them too
        ),
        keys.always("unread_positions", _UNREAD),
        keys.VOCABULARY,
        keys.activation("activation_function", {"relu": "relu", "gelu": "gelu", **keys.GELU_TANH}, "relu"),
        keys.always("gated_linear_unit", False),
        keys.always("normalization", "LayerNorm"),
        keys.always("norm_epsilon", 1e-5),
        keys.always("position_embedding", "learned_absolute"),
        keys.biases("enable_bias", True),
        keys.Rule(("word_embed_proj_dim",), _read_width, lambda model: {"word_embed_proj_dim": model.hidden_size}),
        keys.only("do_layer_norm_before", True),
        keys.only("_remove_final_layer_norm", False),
        keys.only("layer_norm_elementwise_affine", True),
        keys.tied(True),
    ),
    aliases=(
        Alias("lm_head.weight", of="model.decoder.embed_tokens.weight", switch="tied_embeddings"),
        Alias("lm_head.weight", of="decoder.embed_tokens.weight", switch="tied_embeddings"),
    ),
)
