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
from precisionctl.architectures.param_map import Architecture, Either, Row, renamed
from precisionctl.architectures.rearrangements import GAMMA
from precisionctl.architectures.rope import KEYS, read_rope, rotary_parameters
from precisionctl.architectures.shared.llama_rows import EMBEDDING, OUTPUT, PROJ_BIAS, QKV_BIASES
from precisionctl.model_shape import ModelShape
from precisionctl.param import COLUMNS, ROWS


def _read_rope(config: Config, where: object) -> Fields:
    """transformers 4 has `rotary_emb_base` and `rotary_pct`."""
    older = {"rope_theta": config.get("rotary_emb_base"), "partial_rotary_factor": config.get("rotary_pct")}
    beside = dict(config) | {key: value for key, value in older.items() if value is not None}
    return read_rope(beside, where, rotary_parameters(config, where, 10000.0), 10000.0, 0.25)


def _write_rope(model: ModelShape) -> Config:
    scaling = {"rope_scaling": dict(model.rope_scaling)} if model.rope_scaling else {}
    return {"rotary_emb_base": model.rotary_base, "rotary_pct": model.rotary_percent, **scaling}


def _read_bias(config: Config, where: object) -> Fields:
    return dict.fromkeys(("qkv_bias", "proj_bias"), is_on(config, "attention_bias", where, True))


ARCHITECTURE = Architecture(
    model_types={"gpt_neox": "GPTNeoXForCausalLM"},
    rows=(
        *renamed(EMBEDDING, {"model.embed_tokens": "gpt_neox.embed_in"}),
        Row(
            "gpt_neox.layers.{layer}.input_layernorm.weight",
            "decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight",
            ("hidden_size",),
            GAMMA,
        ),
        Row(
            "gpt_neox.layers.{layer}.input_layernorm.bias",
            "decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_bias",
            ("hidden_size",),
        ),
        Row(
            "gpt_neox.layers.{layer}.attention.query_key_value.weight",
            "decoder.layers.{layer}.self_attention.linear_qkv.weight",
            ("qkv_size", "hidden_size"),
            parallel=ROWS,
            gemm=True,
        ),
        Row(
            "gpt_neox.layers.{layer}.attention.query_key_value.bias",
            "decoder.layers.{layer}.self_attention.linear_qkv.bias",
            ("qkv_size",),
            parallel=ROWS,
            present=QKV_BIASES,
        ),
        Row(
            "gpt_neox.layers.{layer}.attention.dense.weight",
            "decoder.layers.{layer}.self_attention.linear_proj.weight",
            ("hidden_size", "projection_size"),
            parallel=COLUMNS,
            gemm=True,
        ),
        Row(
            "gpt_neox.layers.{layer}.attention.dense.bias",
            "decoder.layers.{layer}.self_attention.linear_proj.bias",
            ("hidden_size",),
            present=PROJ_BIAS,
        ),
        Row(
            "gpt_neox.layers.{layer}.post_attention_layernorm.weight",
            "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight",
            ("hidden_size",),
            GAMMA,
        ),
        Row(
            "gpt_neox.layers.{layer}.post_attention_layernorm.bias",
            "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_bias",
            ("hidden_size",),
        ),
        Row(
            "gpt_neox.layers.{layer}.mlp.dense_h_to_4h.weight",
            "decoder.layers.{layer}.mlp.linear_fc1.weight",
            ("fc1_size", "hidden_size"),
            parallel=ROWS,
            gemm=True,
        ),
        Row(
            "gpt_neox.layers.{layer}.mlp.dense_h_to_4h.bias",
            "decoder.layers.{layer}.mlp.linear_fc1.bias",
            ("fc1_size",),
            parallel=ROWS,
        ),
        Row(
            "gpt_neox.layers.{layer}.mlp.dense_4h_to_h.weight",
            "decoder.layers.{layer}.mlp.linear_fc2.weight",
            ("hidden_size", "ffn_hidden_size"),
            parallel=COLUMNS,
            gemm=True,
        ),
        Row(
            "gpt_neox.layers.{layer}.mlp.dense_4h_to_h.bias",
            "decoder.layers.{layer}.mlp.linear_fc2.bias",
            ("hidden_size",),
        ),
        Row("gpt_neox.final_layer_norm.weight", "decoder.final_layernorm.weight", ("hidden_size",), GAMMA),
        Row("gpt_neox.final_layer_norm.bias", "decoder.final_layernorm.bias", ("hidden_size",)),
        Either(renamed(OUTPUT, {"lm_head": "embed_out"}), OUTPUT, second_is="in memory"),
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
    derived=(
        "gpt_neox.layers.{layer}.attention.bias",
        "gpt_neox.layers.{layer}.attention.masked_bias",
        "gpt_neox.layers.{layer}.attention.rotary_emb.inv_freq",
    ),
    names_by="this project",
)
