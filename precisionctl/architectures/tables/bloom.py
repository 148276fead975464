"""BLOOM: scores that fall with distance in the place of positions, and a norm of embeddings; beside that GPT-NeoX with
one block after the other.

Traps: files of the Hub leave out the prefix `transformer.`; an older word, `n_embed`, wins over `hidden_size`. What
`seq_length` says, no class reads: any length is computed.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Alias, Architecture, Either, Row, renamed
from precisionctl.architectures.rearrangements import GAMMA
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.tables.falcon import NAMES
from precisionctl.architectures.tables.gpt2 import body, sizes

_EMBEDDING_NORM = (
    Row("transformer.word_embeddings_layernorm.weight", "embedding.layernorm.weight", ("hidden_size",), GAMMA),
    Row("transformer.word_embeddings_layernorm.bias", "embedding.layernorm.bias", ("hidden_size",)),
)
_BODY = (
    *renamed(body(llama.JOINED_QKV), NAMES),
    *_EMBEDDING_NORM,
)
_SIZES = sizes("n_layer", "hidden_size", "n_head", inner=None)  # which is always four times as much
_ABSENT = {"n_layer": 2, "hidden_size": 64, "n_head": 8}


def _read_sizes(config: keys.Config) -> keys.Fields:
    older = {} if config.get("n_embed") is None else {"hidden_size": config["n_embed"]}
    return _SIZES.read({**_ABSENT, **config, **older})


ARCHITECTURE = Architecture(
    model_types={"bloom": "BloomForCausalLM"},
    rows=(Either(_BODY, other=renamed(_BODY, {"transformer.": ""})), *llama.OUTPUT),
    config=(
        keys.Reworded(
            keys.Rule(("n_layer", "hidden_size", "n_head", "n_embed"), _read_sizes, _SIZES.write),
            {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
            published=False,
        ),
        keys.Key("max_position_embeddings", "seq_length", 2048),
        keys.VOCABULARY,
        keys.always("activation", "gelu_tanh"),
        keys.always("gated_linear_unit", False),
        keys.always("normalization", "LayerNorm"),
        keys.Key("norm_epsilon", "layer_norm_epsilon", 1e-5),
        keys.always("position_embedding", "alibi"),
        keys.always("embedding_layernorm", True),
        *keys.ALL_BIASES,
        keys.only("apply_residual_connection_post_layernorm", False),
        keys.tied(True),
    ),
    aliases=(
        Alias("lm_head.weight", of="transformer.word_embeddings.weight", switch="tied_embeddings"),
        Alias("lm_head.weight", of="word_embeddings.weight", switch="tied_embeddings"),
    ),
    names_by="this project",
)
