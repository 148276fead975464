"""MPT: scores that fall with distance in the place of positions, LayerNorms without biases, an MLP of exact GELUs.

Traps: transformers' class heeds few of its settings, and has ALiBi, no biases and an MLP four times as wide whatever
config.json says; what other programs would compute otherwise is refused. `Wqkv` is all queries, then keys, then values.
"""

from collections.abc import Mapping
from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.head_rearrangements import QKV
from precisionctl.architectures.param_map import TIED, Architecture, renamed
from precisionctl.architectures.rearrangements import Joined
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.tables.gpt2 import sizes
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_parts import real

NAMES = {
    "model.embed_tokens.": "transformer.wte.",
    "model.layers.": "transformer.blocks.",
    "model.norm.": "transformer.norm_f.",
    ".input_layernorm.": ".norm_1.",
    ".post_attention_layernorm.": ".norm_2.",
    ".self_attn.query_key_value.": ".attn.Wqkv.",
    ".self_attn.o_proj.": ".attn.out_proj.",
    ".mlp.": ".ffn.",
}
_JOINED_QKV = replace(
    llama.QKV_LINEAR[0], names="model.layers.{layer}.self_attn.query_key_value.weight", rearrangement=Joined(QKV)
)

_SIZES = sizes("n_layers", "d_model", "n_heads", inner=None)
_ABSENT = {"n_layers": 24, "d_model": 2048, "n_heads": 16}

_ATTENTION: Mapping[str, object] = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "alibi_bias_max": 8,
    "qk_ln": False,
    "softmax_scale": None,
    "prefix_lm": False,
}
"""What its class takes for keys that are not in `attn_config`, and the only values known here."""


def _read_attention(config: keys.Config) -> keys.Fields:
    said = keys.section(config, "attn_config")
    for key, known in _ATTENTION.items():
        if said.get(key, known) != known:
            what = f"no mpt known here has {key}={shown(said[key])} in attn_config"
            raise UnknownArchitecture(what, do=f"Its table was made for {key}={known!r}.")
    clip = said.get("clip_qkv")
    return {"clip_qkv": real(clip, "clip_qkv") if clip else None}


ARCHITECTURE = Architecture(
    model_types={"mpt": "MptForCausalLM"},
    rows=renamed(
        (
            *(*llama.EMBEDDING, *llama.ATTENTION_NORM, _JOINED_QKV, *llama.PROJ, *llama.MLP_NORM, *llama.UNGATED_MLP),
            *(*llama.FINAL_NORM, *llama.ZERO_NORM_BIASES, *llama.OUTPUT),
        ),
        NAMES,
    ),
    config=(
        keys.Reworded(
            keys.Rule(
                ("n_layers", "d_model", "n_heads"),
                lambda config: _SIZES.read({**_ABSENT, **config}),
                _SIZES.write,
            ),
            {"n_layers": "num_hidden_layers", "d_model": "hidden_size", "n_heads": "num_attention_heads"},
            published=False,
        ),
        keys.only("expansion_ratio", 4),
        keys.Key("max_position_embeddings", "max_seq_len", 2048),
        keys.VOCABULARY,
        keys.Rule(
            ("attn_config",),
            _read_attention,
            lambda model: {"attn_config": {**_ATTENTION, "clip_qkv": model.clip_qkv}},
        ),
        keys.always("position_embedding", "alibi"),
        keys.only("no_bias", True),
        keys.only("logit_scale", None),
        keys.always("activation", "gelu"),
        keys.always("gated_linear_unit", False),
        keys.always("normalization", "LayerNorm"),
        keys.always("norm_bias", False),
        keys.Key("norm_epsilon", "layer_norm_epsilon", 1e-5),
        keys.tied(True),
    ),
    aliases=(replace(TIED, of="transformer.wte.weight"),),
)
