"""GPT-NeoX and Pythia.

Traps: attention and MLP have norms of their own but are added together, or one after the other (RedPajama-INCITE);
`query_key_value` is q, k, v by head, as in Megatron.
"""

from precisionctl.architectures.config_keys import (
    GELU_TANH,
    HEADS,
    SIZES,
    Always,
    Config,
    Fields,
    Key,
    Rule,
    activation,
    is_on,
    tied,
)
from precisionctl.architectures.param_map import Architecture, Either, renamed
from precisionctl.architectures.rope import KEYS, read_rope, rotary_parameters
from precisionctl.architectures.shared.llama_rows import JOINED_QKV, OUTPUT
from precisionctl.architectures.tables.gpt2 import body
from precisionctl.model.model_shape import ModelShape

NAMES = {
    "model.embed_tokens": "gpt_neox.embed_in",
    "model.layers.": "gpt_neox.layers.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.": ".attention.",
    ".up_proj.": ".dense_h_to_4h.",
    ".down_proj.": ".dense_4h_to_h.",
    "model.norm.": "gpt_neox.final_layer_norm.",
    "lm_head": "embed_out",
}


def _read_rope(config: Config) -> Fields:
    """transformers 4 has `rotary_emb_base` and `rotary_pct`."""
    older = {"rope_theta": config.get("rotary_emb_base"), "partial_rotary_factor": config.get("rotary_pct")}
    beside = dict(config) | {key: value for key, value in older.items() if value is not None}
    return read_rope(beside, rotary_parameters(config, 10000.0), 10000.0, 0.25)


def _write_rope(model: ModelShape) -> Config:
    scaling = {"rope_scaling": dict(model.rope_scaling)} if model.rope_scaling else {}
    return {"rotary_emb_base": model.rotary_base, "rotary_pct": model.rotary_percent, **scaling}


def _read_bias(config: Config) -> Fields:
    return dict.fromkeys(("qkv_bias", "proj_bias"), is_on(config, "attention_bias", True))


ARCHITECTURE = Architecture(
    model_types={"gpt_neox": "GPTNeoXForCausalLM"},
    rows=(
        *renamed(
            body(JOINED_QKV),
            NAMES,
        ),
        Either(renamed(OUTPUT, NAMES), OUTPUT, second_is="in memory"),
    ),
    config=(
        *SIZES,
        HEADS,
        Rule(("attention_bias",), _read_bias, lambda model: {"attention_bias": model.qkv_bias}),
        activation("hidden_act", {"gelu": "gelu", **GELU_TANH}, "gelu"),
        Always("gated_linear_unit", False),
        Always("normalization", "LayerNorm"),
        Key("norm_epsilon", "layer_norm_eps", 1e-5),
        Rule((*KEYS, "rotary_emb_base", "rotary_pct"), _read_rope, _write_rope),
        Always("mlp_bias", True),
        Key("parallel_residual", "use_parallel_residual", True),  # false: RedPajama-INCITE
        tied(False),
    ),
    aliases=(),
    derived=(
        "gpt_neox.layers.{layer}.attention.bias",
        "gpt_neox.layers.{layer}.attention.masked_bias",
        "gpt_neox.layers.{layer}.attention.rotary_emb.inv_freq",
    ),
    names_by="this project",
)
