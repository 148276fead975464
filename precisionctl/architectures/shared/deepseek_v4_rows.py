"""Rows of DeepSeek-V4: published names, those that transformers saves, and those that its class has in memory. Names in
Megatron are those of Megatron-Core's dev branch (transformer/experimental_attention_variant/csa.py and
deepseek_v4_hybrid_attention.py, hyper_connection.py), as Megatron-Bridge and mcore-bridge fill them.

Traps: where windows overlap, projections have twice as many rows. `norm` is that of compressed keys in published files,
and that of keys, too, in transformers'. The output projection by groups has no `.weight` in Megatron.
"""

from dataclasses import replace
from typing import Literal

from precisionctl.architectures.param_map import Either, Row, renamed, when
from precisionctl.architectures.rearrangements import GAMMA, GATE_UP, VOCABULARY
from precisionctl.architectures.row_layers import COMPRESSED, Layers
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.hyper_connection_rows import head, hyper_connection
from precisionctl.model.sparse_parts import CSA
from precisionctl.param import COLUMNS, GATED_ROWS, ROWS

_HF, _MEGATRON = "layers.{layer}.", "decoder.layers.{layer}."
_ATTENTION, _CORE = f"{_MEGATRON}self_attention.", f"{_MEGATRON}self_attention.core_attention."


def _norm(hf: str, megatron: str, size: str, layers: Layers = "all") -> Row:
    """A norm's row, which the class keeps in FP32."""
    return Row(f"{hf}.weight", f"{megatron}.weight", (size,), GAMMA, layers=layers, keeps_dtype=True)


def _compressor(of: str, layers: Literal["sparse", "heavy"], rows: str, head: str) -> tuple[Row, ...]:
    """What makes one key, of `head` channels, of several tokens: linears of so many `rows`, and positions in the
    window, which are added to the second's."""
    hf, megatron, tokens = f"{_HF}attn.{of}compressor.", f"{_CORE}{of}compressor.", CSA.RATIOS[COMPRESSED[layers]]
    return (
        Row(f"{hf}ape", f"{megatron}ape", (tokens, rows), layers=layers, keeps_dtype=True),
        Row(f"{hf}wkv.weight", f"{megatron}linear_wkv.weight", (rows, "hidden_size"), layers=layers),
        Row(f"{hf}wgate.weight", f"{megatron}linear_wgate.weight", (rows, "hidden_size"), layers=layers),
        _norm(f"{hf}norm", f"{megatron}norm", head, layers),
    )


_SCALES = ("pre", "post", "res")

_LAYER = (
    *hyper_connection(f"{_HF}hc_attn_", "self_attention", _SCALES),
    _norm(f"{_HF}attn_norm", f"{_MEGATRON}input_layernorm", "hidden_size"),
    Row(
        f"{_HF}attn.wq_a.weight",
        f"{_ATTENTION}linear_q_down_proj.weight",
        ("csa.q_lora_rank", "hidden_size"),
        gemm=True,
    ),
    _norm(f"{_HF}attn.q_norm", f"{_ATTENTION}q_layernorm", "csa.q_lora_rank"),
    Row(
        f"{_HF}attn.wq_b.weight",
        f"{_ATTENTION}linear_q_up_proj.weight",
        ("query_size", "csa.q_lora_rank"),
        parallel=ROWS,
        gemm=True,
    ),
    Row(f"{_HF}attn.wkv.weight", f"{_ATTENTION}linear_kv_proj.weight", ("kv_channels", "hidden_size"), gemm=True),
    _norm(f"{_HF}attn.kv_norm", f"{_ATTENTION}kv_layernorm", "kv_channels"),
    Row(f"{_HF}attn.attn_sink", f"{_CORE}attn_sink", ("num_attention_heads",), parallel=ROWS, keeps_dtype=True),
    Row(
        f"{_HF}attn.wo_a.weight",
        f"{_ATTENTION}linear_o_group_proj",
        ("csa.grouped_size", "group_size"),
        only_exported=True,
    ),
    Row(
        f"{_HF}attn.wo_b.weight",
        f"{_ATTENTION}linear_proj.weight",
        ("hidden_size", "csa.grouped_size"),
        parallel=COLUMNS,
        gemm=True,
    ),
    *hyper_connection(f"{_HF}hc_ffn_", "mlp", _SCALES),
    _norm(f"{_HF}ffn_norm", f"{_MEGATRON}pre_mlp_layernorm", "hidden_size"),
    Row(f"{_HF}ffn.gate.weight", f"{_MEGATRON}mlp.router.weight", ("moe.num_experts", "hidden_size")),
    Row(
        f"{_HF}ffn.gate.bias",
        f"{_MEGATRON}mlp.router.expert_bias",
        ("moe.num_experts",),
        layers="scored",
        keeps_dtype=True,
    ),
    Row(
        (f"{_HF}ffn.shared_experts.w1.weight", f"{_HF}ffn.shared_experts.w3.weight"),
        f"{_MEGATRON}mlp.shared_experts.linear_fc1.weight",
        ("shared_fc1_size", "hidden_size"),
        GATE_UP,
        GATED_ROWS,
        gemm=True,
    ),
    Row(
        f"{_HF}ffn.shared_experts.w2.weight",
        f"{_MEGATRON}mlp.shared_experts.linear_fc2.weight",
        ("hidden_size", "moe.shared_ffn_hidden_size"),
        parallel=COLUMNS,
        gemm=True,
    ),
)
"""What every layer has beside experts, those of multi-token prediction too."""

_COMPRESSED = (
    *_compressor("", "heavy", "kv_channels", "kv_channels"),
    *_compressor("", "sparse", "overlapping_size", "kv_channels"),
    *_compressor("indexer.", "sparse", "csa.overlapping_size", "csa.head_dim"),
    Row(
        f"{_HF}attn.indexer.wq_b.weight",
        f"{_CORE}indexer.linear_wq_b.weight",
        ("csa.query_size", "csa.q_lora_rank"),
        layers="sparse",
    ),
    Row(
        f"{_HF}attn.indexer.weights_proj.weight",
        f"{_CORE}indexer.linear_weights_proj.weight",
        ("csa.n_heads", "hidden_size"),
        layers="sparse",
    ),
)

_EXPERTS = moe.experts(f"{_HF}ffn.experts")


_DECODER = (
    Row("embed.weight", "embedding.word_embeddings.weight", ("padded_vocab_size", "hidden_size"), VOCABULARY, ROWS),
    *_LAYER,
    *_COMPRESSED,
    Row(
        f"{_HF}ffn.gate.tid2eid",
        f"{_MEGATRON}mlp.router.tid2eid",
        ("vocab_size", "moe.topk"),
        layers="hashed",
        integers_below="moe.num_experts",
    ),
    *head("hc_head_", "decoder."),
)
_FINAL_NORM = _norm("norm", "decoder.final_layernorm", "hidden_size")
_OUTPUT = Row(
    "head.weight",
    "output_layer.weight",
    ("padded_vocab_size", "hidden_size"),
    VOCABULARY,
    ROWS,
    present=when("untied_embeddings"),
)

_BODY = {"layers.": "model.layers.", "embed.": "model.embed_tokens.", "hc_head_": "model.hc_head.hc_"}
_SAVED = {**_BODY, ".attn.kv_norm.": ".attn.norm."}
"""What transformers (5.24) saves: it turns its own renamings around, of which two make the same name."""

_IN_MEMORY = {
    **_BODY,
    ".attn.compressor.norm.": ".attn.compressor.kv_norm.",
    ".attn.indexer.compressor.norm.": ".attn.compressor.indexer.kv_norm.",
    ".attn.indexer.compressor.": ".attn.compressor.indexer.",
    ".attn.indexer.weights_proj.": ".attn.compressor.indexer.scorer.weights_proj.",
    ".attn.indexer.": ".attn.compressor.indexer.",
    ".wkv.": ".kv_proj.",
    ".wgate.": ".gate_proj.",
    ".wq_a.": ".q_a_proj.",
    ".wq_b.": ".q_b_proj.",
    ".wo_a.": ".o_a_proj.",
    ".wo_b.": ".o_b_proj.",
    ".q_norm.": ".q_a_norm.",
    ".ape": ".position_bias",
    ".attn_sink": ".sinks",
    ".attn_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".hc_attn_": ".attn_hc.",
    ".hc_ffn_": ".ffn_hc.",
    ".gate.bias": ".gate.e_score_correction_bias",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
    ".attn.": ".self_attn.",
    ".ffn.": ".mlp.",
}

_PREDICTION = (
    *(
        _norm(f"mtp.{{mtp}}.{hf}", f"mtp.layers.{{mtp}}.{megatron}", "hidden_size")
        for hf, megatron in {"enorm": "enorm", "hnorm": "hnorm", "norm": "final_layernorm"}.items()
    ),
    *(
        Row(
            f"mtp.{{mtp}}.{name}.weight",
            f"mtp.layers.{{mtp}}.{name}.weight",
            ("hidden_size", "hidden_size"),
            parallel=ROWS,
        )
        for name in ("e_proj", "h_proj")
    ),
    *renamed((*_LAYER, *_EXPERTS), {_HF: "mtp.{mtp}."}, llama.PREDICTION_LAYER),
    *head("mtp.{mtp}.hc_head_", "mtp.layers.{mtp}."),
)

ROWS_OF_MODEL: tuple[Row | Either, ...] = (
    Either(
        (*_DECODER, *_EXPERTS, _FINAL_NORM),
        in_memory=(*renamed(_DECODER, _IN_MEMORY), *moe.FUSED, replace(_FINAL_NORM, names="model.norm.weight")),
        other=(*renamed((*_DECODER, *_EXPERTS), _SAVED), replace(_FINAL_NORM, names="model.norm.weight")),
    ),
    Either((_OUTPUT,), in_memory=(replace(_OUTPUT, names="lm_head.weight"),)),
    *_PREDICTION,
)
