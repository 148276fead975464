"""Rows of DeepSeek-V2, V3 and V3.2, and of families with the same experts: latent attention, an indexer of its keys,
leading dense layers, routed and shared experts, layers of multi-token prediction.

Rows of a prediction layer are the decoder's under other names, and what joins them.
"""

from precisionctl.architectures.param_map import Alias, Either, Row, renamed, when
from precisionctl.architectures.rearrangements import GAMMA
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.param import COLUMNS, ROWS

_QUERY_LATENT = when("query_latent")

LATENT_ATTENTION = (
    Row(
        "model.layers.{layer}.self_attn.q_proj.weight",
        "decoder.layers.{layer}.self_attention.linear_q_proj.weight",
        ("query_size", "hidden_size"),
        parallel=ROWS,
        present=when("query_direct"),
        gemm=True,
    ),
    Row(
        "model.layers.{layer}.self_attn.q_a_proj.weight",
        "decoder.layers.{layer}.self_attention.linear_q_down_proj.weight",
        ("mla.q_lora_rank", "hidden_size"),
        present=_QUERY_LATENT,
        gemm=True,
    ),
    Row(
        "model.layers.{layer}.self_attn.q_a_layernorm.weight",
        "decoder.layers.{layer}.self_attention.linear_q_up_proj.layer_norm_weight",
        ("mla.q_lora_rank",),
        GAMMA,
        present=_QUERY_LATENT,
    ),
    Row(
        "model.layers.{layer}.self_attn.q_b_proj.weight",
        "decoder.layers.{layer}.self_attention.linear_q_up_proj.weight",
        ("query_up_size", "query_up_inputs"),
        parallel=ROWS,
        present=_QUERY_LATENT,
        gemm=True,
    ),
    Row(
        "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight",
        "decoder.layers.{layer}.self_attention.linear_kv_down_proj.weight",
        ("kv_down_size", "hidden_size"),
        gemm=True,
    ),
    Row(
        "model.layers.{layer}.self_attn.kv_a_layernorm.weight",
        "decoder.layers.{layer}.self_attention.linear_kv_up_proj.layer_norm_weight",
        ("mla.kv_lora_rank",),
        GAMMA,
    ),
    Row(
        "model.layers.{layer}.self_attn.kv_b_proj.weight",
        "decoder.layers.{layer}.self_attention.linear_kv_up_proj.weight",
        ("key_value_size", "mla.kv_lora_rank"),
        parallel=ROWS,
        gemm=True,
    ),
    Row(
        "model.layers.{layer}.self_attn.o_proj.weight",
        "decoder.layers.{layer}.self_attention.linear_proj.weight",
        ("hidden_size", "projection_size"),
        parallel=COLUMNS,
        gemm=True,
    ),
)

ATTENTION = (*llama.SEPARATE_NORM, *LATENT_ATTENTION)

_INDEXER = "decoder.layers.{layer}.self_attention.core_attention.indexer"

INDEXED_ATTENTION = (
    *renamed(
        ATTENTION,
        {},
        {
            "linear_q_up_proj.layer_norm_weight": "q_layernorm.weight",
            "linear_kv_up_proj.layer_norm_weight": "kv_layernorm.weight",
        },
    ),
    Row(
        "model.layers.{layer}.self_attn.indexer.wq_b.weight",
        f"{_INDEXER}.linear_wq_b.weight",
        ("dsa.query_size", "mla.q_lora_rank"),
        layers="indexed",
    ),
    Row(
        "model.layers.{layer}.self_attn.indexer.wk.weight",
        f"{_INDEXER}.linear_wk.weight",
        ("dsa.head_dim", "hidden_size"),
        layers="indexed",
    ),
    Row(
        "model.layers.{layer}.self_attn.indexer.k_norm.weight",
        f"{_INDEXER}.k_norm.weight",
        ("dsa.head_dim",),
        layers="indexed",
        keeps_dtype=True,  # FP32 as released
    ),
    Row(
        "model.layers.{layer}.self_attn.indexer.k_norm.bias",
        f"{_INDEXER}.k_norm.bias",
        ("dsa.head_dim",),
        layers="indexed",
        keeps_dtype=True,
    ),
    Row(
        "model.layers.{layer}.self_attn.indexer.weights_proj.weight",
        f"{_INDEXER}.linear_weights_proj.weight",
        ("dsa.n_heads", "hidden_size"),
        layers="indexed",
    ),
)
"""With DeepSeek's sparse attention: names of Megatron-Core 0.19, which keeps the norms of latents apart there."""

POOLED_KEYS = tuple(
    Row(
        f"model.layers.{{layer}}.self_attn.indexer.index_kpool_compress_{name}",
        f"{_INDEXER}.index_kpool_compress_{name}",
        sizes,
        present=when("dsa.kpool"),
        layers="indexed",
    )
    for name, sizes in {"ape": ("dsa.kpool", "dsa.head_dim"), "gate": ("dsa.head_dim", "hidden_size")}.items()
)
"""By which an indexer weighs the keys of a pool: what it adds for their places in it, and makes of hidden states."""

ROUTING: tuple[Row | Either, ...] = (*moe.WIDE_ROUTER, *moe.EXPERT_BIAS, *moe.SHARED_EXPERTS)
"""What layers with experts have beside these."""


def decoder(
    attention: tuple[Row | Either, ...],
    experts: tuple[Either, ...] = moe.EXPERTS,
    routing: tuple[Row | Either, ...] = ROUTING,
) -> tuple[Row | Either, ...]:
    """All but prediction layers; `attention` are the rows of a layer up to its second norm."""
    return llama.model_rows(*attention, *llama.MLP_NORM, *llama.MLP, *moe.MOE_NORM, *routing, *experts)


def prediction(
    attention: tuple[Row, ...],
    routing: tuple[Row | Either, ...] = ROUTING,
    last_norm: str = "shared_head.norm",
    experts: tuple[Row | Either, ...] = moe.EXPERTS,
) -> tuple[Row | Either, ...]:
    """Layers of multi-token prediction, of the same attention."""
    layer = (*attention, *llama.MLP_NORM, *llama.MLP, *moe.MOE_NORM, *routing, *experts)
    names = [f"model.layers.{{mtp_layer}}.{name}" for name in ("enorm", "hnorm", "eh_proj", last_norm)]
    in_hf = {"model.layers.{layer}.": "model.layers.{mtp_layer}."}
    return llama.prediction_layer(names, (each.renamed(in_hf, llama.PREDICTION_LAYER) for each in layer))


MTP_ALIASES = (
    Alias(
        "model.layers.{mtp_layer}.embed_tokens.weight",
        of="model.embed_tokens.weight",
        switch="mtp_num_layers",
        written=True,
    ),
    Alias(
        "model.layers.{mtp_layer}.shared_head.head.weight",
        of="lm_head.weight",
        switch="mtp_num_layers",
        written=True,
    ),
)
