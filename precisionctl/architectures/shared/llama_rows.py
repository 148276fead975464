"""Groups of rows that Llama, and every family that took its names from it, have in common."""

from collections.abc import Iterable
from dataclasses import replace

from precisionctl.architectures.head_rearrangements import QKV
from precisionctl.architectures.param_map import Condition, Either, Row, renamed, when
from precisionctl.architectures.rearrangements import GAMMA, GATE_UP, SAME, VOCABULARY, Rearrangement
from precisionctl.param import COLUMNS, GATED_ROWS, ROWS

# Megatron has one switch for all biases and one for QKV's alone; Hugging Face one for the attention or for QKV, and
# one for the MLP
QKV_BIASES = Condition("qkv_bias", ("add_bias_linear", "add_qkv_bias"))
PROJ_BIAS = Condition("proj_bias", ("add_bias_linear",))
MLP_BIAS = Condition("mlp_bias", ("add_bias_linear",))
UNTIED = when("untied_embeddings")

PREDICTION_LAYER = {"decoder.layers.{layer}.": "mtp.layers.{mtp}.transformer_layer."}
"""How the parameters of a layer are called in Megatron where it predicts further tokens."""

EMBEDDING = (
    Row(
        "model.embed_tokens.weight",
        "embedding.word_embeddings.weight",
        ("padded_vocab_size", "hidden_size"),
        VOCABULARY,
        ROWS,
    ),
)

SEPARATE_NORM = (
    Row(
        "model.layers.{layer}.input_layernorm.weight",
        "decoder.layers.{layer}.input_layernorm.weight",
        ("hidden_size",),
        GAMMA,
    ),
)
"""Of a norm that is no part of a linear, as Megatron-Core calls it."""

SEPARATE_LAYER_NORM = (
    *SEPARATE_NORM,
    Row(
        "model.layers.{layer}.input_layernorm.bias",
        "decoder.layers.{layer}.input_layernorm.bias",
        ("hidden_size",),
    ),
)

ATTENTION_NORM = (
    Row(
        "model.layers.{layer}.input_layernorm.weight",
        "decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight",
        ("hidden_size",),
        GAMMA,
    ),
)

QKV_LINEAR = (
    Row(
        (
            "model.layers.{layer}.self_attn.q_proj.weight",
            "model.layers.{layer}.self_attn.k_proj.weight",
            "model.layers.{layer}.self_attn.v_proj.weight",
        ),
        "decoder.layers.{layer}.self_attention.linear_qkv.weight",
        ("qkv_size", "hidden_size"),
        QKV,
        ROWS,
        gemm=True,
    ),
    Row(
        (
            "model.layers.{layer}.self_attn.q_proj.bias",
            "model.layers.{layer}.self_attn.k_proj.bias",
            "model.layers.{layer}.self_attn.v_proj.bias",
        ),
        "decoder.layers.{layer}.self_attention.linear_qkv.bias",
        ("qkv_size",),
        QKV,
        ROWS,
        present=QKV_BIASES,
    ),
)

JOINED_QKV = tuple(
    replace(row, names=f"model.layers.{{layer}}.self_attn.query_key_value.{kind}", rearrangement=SAME)
    for row, kind in zip(QKV_LINEAR, ("weight", "bias"), strict=True)
)
"""In one tensor: q, k, v by group, as in Megatron."""

QK_NORMS = (
    Row(
        "model.layers.{layer}.self_attn.q_norm.weight",
        "decoder.layers.{layer}.self_attention.q_layernorm.weight",
        ("kv_channels",),
        GAMMA,
        present=when("qk_layernorm"),
    ),
    Row(
        "model.layers.{layer}.self_attn.k_norm.weight",
        "decoder.layers.{layer}.self_attention.k_layernorm.weight",
        ("kv_channels",),
        GAMMA,
        present=when("qk_layernorm"),
    ),
)

QK_NORMS_OVER_HEADS = (
    Row(
        "model.layers.{layer}.self_attn.q_norm.weight",
        "decoder.layers.{layer}.self_attention.q_layernorm.weight",
        ("query_size",),
        GAMMA,
        ROWS,
    ),
    Row(
        "model.layers.{layer}.self_attn.k_norm.weight",
        "decoder.layers.{layer}.self_attention.k_layernorm.weight",
        ("key_size",),
        GAMMA,
        ROWS,
    ),
)

PROJ = (
    Row(
        "model.layers.{layer}.self_attn.o_proj.weight",
        "decoder.layers.{layer}.self_attention.linear_proj.weight",
        ("hidden_size", "projection_size"),
        parallel=COLUMNS,
        gemm=True,
    ),
    Row(
        "model.layers.{layer}.self_attn.o_proj.bias",
        "decoder.layers.{layer}.self_attention.linear_proj.bias",
        ("hidden_size",),
        present=PROJ_BIAS,
    ),
)

LINEAR_GATE = (
    Row(
        "model.layers.{layer}.self_attn.g_proj.weight",
        "decoder.layers.{layer}.self_attention.linear_gate.weight",
        ("gate_size", "hidden_size"),
        parallel=ROWS,
        present=when("linear_gate"),
    ),
)
"""Which stays in BF16, in training and exports."""

ATTENTION = (*QKV_LINEAR, *QK_NORMS, *PROJ)

MLP_NORM = (
    Row(
        "model.layers.{layer}.post_attention_layernorm.weight",
        "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight",
        ("hidden_size",),
        GAMMA,
        layers="dense",
    ),
)

DOWN = Row(
    "model.layers.{layer}.mlp.down_proj.weight",
    "decoder.layers.{layer}.mlp.linear_fc2.weight",
    ("hidden_size", "ffn_hidden_size"),
    parallel=COLUMNS,
    layers="dense",
    gemm=True,
)

DOWN_BIAS = Row(
    "model.layers.{layer}.mlp.down_proj.bias",
    "decoder.layers.{layer}.mlp.linear_fc2.bias",
    ("hidden_size",),
    present=MLP_BIAS,
    layers="dense",
)

MLP = (
    Row(
        ("model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"),
        "decoder.layers.{layer}.mlp.linear_fc1.weight",
        ("fc1_size", "hidden_size"),
        GATE_UP,
        GATED_ROWS,
        layers="dense",
        gemm=True,
    ),
    Row(
        ("model.layers.{layer}.mlp.gate_proj.bias", "model.layers.{layer}.mlp.up_proj.bias"),
        "decoder.layers.{layer}.mlp.linear_fc1.bias",
        ("fc1_size",),
        GATE_UP,
        GATED_ROWS,
        present=MLP_BIAS,
        layers="dense",
    ),
    DOWN,
    DOWN_BIAS,
)

UNGATED_MLP = (
    Row(
        "model.layers.{layer}.mlp.up_proj.weight",
        "decoder.layers.{layer}.mlp.linear_fc1.weight",
        ("fc1_size", "hidden_size"),
        parallel=ROWS,
        gemm=True,
    ),
    Row(
        "model.layers.{layer}.mlp.up_proj.bias",
        "decoder.layers.{layer}.mlp.linear_fc1.bias",
        ("fc1_size",),
        parallel=ROWS,
        present=MLP_BIAS,
    ),
    DOWN,
    DOWN_BIAS,
)

JOINED_MLP = (
    Row(  # gate, then up, on both sides
        "model.layers.{layer}.mlp.gate_up_proj.weight",
        "decoder.layers.{layer}.mlp.linear_fc1.weight",
        ("fc1_size", "hidden_size"),
        parallel=GATED_ROWS,
        gemm=True,
    ),
    DOWN,
)

POST_ATTENTION_NORM = (
    Row(
        "model.layers.{layer}.post_attention_layernorm.weight",
        "decoder.layers.{layer}.self_attention.linear_proj.post_layernorm.weight",
        ("hidden_size",),
        GAMMA,
    ),
)
"""Of what attention gives, before it is added: beside the norms before a block in Gemma 2 and 3, and instead of these
in OLMo 2 and others."""

POST_MLP_NORM = (
    Row(
        "model.layers.{layer}.post_feedforward_layernorm.weight",
        "decoder.layers.{layer}.mlp.linear_fc2.post_layernorm.weight",
        ("hidden_size",),
        GAMMA,
        layers="dense",
    ),
)
"""As POST_ATTENTION_NORM, of what the MLP gives."""

PRE_MLP_NORM = renamed(MLP_NORM, {"post_attention": "pre_feedforward"})
"""As files call it that have the one behind attention, too."""

AFTER_ATTENTION = (*POST_ATTENTION_NORM, *PRE_MLP_NORM, *MLP, *POST_MLP_NORM)
"""What follows attention in layers with norms before and behind both blocks, as Gemma 2's and 3's are."""

_ATTENTION_NORM_BIAS = (
    Row(
        "model.layers.{layer}.input_layernorm.bias",
        "decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_bias",
        ("hidden_size",),
    ),
)

_MLP_NORM_BIAS = (
    Row(
        "model.layers.{layer}.post_attention_layernorm.bias",
        "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_bias",
        ("hidden_size",),
    ),
)

_FINAL_NORM_BIAS = (Row("model.norm.bias", "decoder.final_layernorm.bias", ("hidden_size",)),)

NORM_BIASES = (*_ATTENTION_NORM_BIAS, *_MLP_NORM_BIAS, *_FINAL_NORM_BIAS)

ZERO_NORM_BIASES = tuple(replace(row, present=Condition("norm_bias", ("layer_norms",))) for row in NORM_BIASES)
"""Of LayerNorms that have none in Hugging Face, where `norm_bias` is off."""

FINAL_NORM = (Row("model.norm.weight", "decoder.final_layernorm.weight", ("hidden_size",), GAMMA),)

ATTENTION_LAYER_NORM = (*ATTENTION_NORM, *_ATTENTION_NORM_BIAS)
MLP_LAYER_NORM = (*MLP_NORM, *_MLP_NORM_BIAS)
FINAL_LAYER_NORM = (*FINAL_NORM, *_FINAL_NORM_BIAS)

OUTPUT = (
    Row(
        "lm_head.weight",
        "output_layer.weight",
        ("padded_vocab_size", "hidden_size"),
        VOCABULARY,
        ROWS,
        present=UNTIED,
    ),
)

OUTPUT_BIAS = (Row("lm_head.bias", "output_layer.bias", ("padded_vocab_size",), VOCABULARY, ROWS),)


def model_rows(*layers: Row | Either, ending: tuple[Row, ...] = FINAL_NORM) -> tuple[Row | Either, ...]:
    """All rows of a model whose layers have these; `ending` are those between the layers' and the output's."""
    return (*EMBEDDING, *layers, *ending, *OUTPUT)


def prediction_layer(
    names: Iterable[str], layer: Iterable[Row | Either], joined: Rearrangement = SAME
) -> tuple[Row | Either, ...]:
    """Rows of a layer of multi-token prediction around those of its `layer`, by the names of four modules: norms of the
    next token's embedding and of the hidden state, the linear that joins both, and the last norm. Its input is the
    embedding's half, then the hidden state's, in Megatron, and in Hugging Face unless `joined` says otherwise."""

    def norm(name: str, megatron: str) -> Row:
        return Row(f"{name}.weight", f"mtp.layers.{{mtp}}.{megatron}.weight", ("hidden_size",), GAMMA)

    embedding_norm, hidden_norm, joining, last_norm = names
    sizes = ("hidden_size", "doubled_hidden_size")
    return (
        norm(embedding_norm, "enorm"),
        norm(hidden_norm, "hnorm"),
        Row(f"{joining}.weight", "mtp.layers.{mtp}.eh_proj.weight", sizes, joined, ROWS),
        *layer,
        norm(last_norm, "final_layernorm"),
    )
