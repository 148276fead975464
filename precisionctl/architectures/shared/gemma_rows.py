"""Groups of rows that Gemma 3n and Gemma 4 have in common: attention whose last layers read keys and values of earlier
ones, and a token's embedding for each layer.
"""

from dataclasses import replace

from precisionctl.architectures.param_map import Row, only_with, when
from precisionctl.architectures.rearrangements import GAMMA, SAME, Vocabulary
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.param import ROWS

QKV, _ = llama.QKV_LINEAR
QUERY, KEY, _VALUE = QKV.hf
_Q_NORM, _K_NORM = llama.QK_NORMS
_UNUSED = "decoder.layers.{layer}.self_attention.unused_"
_SHARING = (
    replace(QKV, names=QUERY, sizes=("query_size", "hidden_size"), rearrangement=SAME),
    Row(KEY, f"{_UNUSED}linear_k.weight", ("key_size", "hidden_size"), present=when("stores_unused"), gemm=True),
    Row(_VALUE, f"{_UNUSED}linear_v.weight", ("key_size", "hidden_size"), present=when("stores_unused"), gemm=True),
    replace(_K_NORM, megatron=f"{_UNUSED}k_norm.weight", present=when("stores_unused")),
)
"""Of layers that share keys and values. Engines that fuse the projections of all layers need the unused ones as codes
where the queries' are (vLLM's models/gemma4.py until vllm#54917)."""


def sharing_attention(*own: Row) -> tuple[Row, ...]:
    """Of a kind of layers, whose own projections are these, but for those that share keys and values."""
    kept = (replace(row, shares_kv=False) for row in (*own, _K_NORM))
    return (*kept, *(replace(row, shares_kv=True) for row in _SHARING), _Q_NORM, *llama.PROJ)


PER_LAYER = only_with(
    "per_layer_embed_dim",
    (
        Row(
            "model.embed_tokens_per_layer.weight",
            "embedding.per_layer_embedding.weight",
            ("padded_vocab_size", "per_layer_embed_size"),
            Vocabulary("per_layer_tokens"),
            ROWS,
        ),
        Row(
            "model.per_layer_model_projection.weight",
            "embedding.per_layer_model_proj.weight",
            ("per_layer_embed_size", "hidden_size"),
        ),
        Row(
            "model.per_layer_projection_norm.weight",
            "embedding.per_layer_proj_norm.weight",
            ("per_layer_embed_dim",),
            GAMMA,
        ),
        Row(
            "model.layers.{layer}.per_layer_input_gate.weight",
            "decoder.layers.{layer}.per_layer_input_gate.weight",
            ("per_layer_embed_dim", "hidden_size"),
        ),
        Row(
            "model.layers.{layer}.per_layer_projection.weight",
            "decoder.layers.{layer}.per_layer_projection.weight",
            ("hidden_size", "per_layer_embed_dim"),
        ),
        Row(
            "model.layers.{layer}.post_per_layer_input_norm.weight",
            "decoder.layers.{layer}.post_per_layer_input_norm.weight",
            ("hidden_size",),
            GAMMA,
        ),
    ),
)
"""Under Megatron-Bridge's names (models/gemma/gemma4_bridge.py), but those outside of layers within `embedding`, with
which they are on the first stage of a pipeline. As there, no GEMM of them computes in FP8."""
