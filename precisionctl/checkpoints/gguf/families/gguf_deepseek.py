"""DeepSeekMoE; DeepSeek-V2, V3 and V3.2, and Kimi K2, whose latent attention GLM-4.7-Flash and GLM-5 have too
(`gguf_glm.py`).

Sources: llama.cpp's src/models/deepseek.cpp, deepseek2.cpp, deepseek32.cpp and glm-dsa.cpp, and conversion/deepseek.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.tensor_changes import LATENT_KEYS_VALUES
from precisionctl.model.model_shape import ModelShape

_ROWS = [
    *rows.outside_layers(),
    *rows.in_layers(
        {
            **rows.NORMS,
            "self_attn.q_proj": "attn_q",
            "self_attn.q_a_proj": "attn_q_a",
            "self_attn.q_a_layernorm": "attn_q_a_norm",
            "self_attn.q_b_proj": "attn_q_b",
            "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
            "self_attn.kv_a_layernorm": "attn_kv_a_norm",
            "self_attn.o_proj": "attn_output",
        }
    ),
    rows.replaced_by("self_attn.kv_b_proj", ("attn_k_b", "attn_v_b"), LATENT_KEYS_VALUES),
    *rows.MLP,
    *rows.ROUTER,
    rows.EXPERT_BIAS,
    *rows.EXPERTS,
    *rows.SHARED_EXPERTS,
    *rows.PREDICTION,
]
_ROWS_WITH_INDEXERS = [
    *_ROWS,
    *rows.linears({"self_attn.indexer.k_norm": "indexer.k_norm"}),
    *rows.in_layers(
        {
            "self_attn.indexer.weights_proj": "indexer.proj",
            "self_attn.indexer.wk": "indexer.attn_k",
            "self_attn.indexer.wq_b": "indexer.attn_q_b",
        }
    ),
]

# Latent attention


def _read_query_rank(file: Described) -> Fields:
    rank = file.count("attention.q_lora_rank", None)
    return {"mla.q_lora_rank": rank if file.has("blk.0.attn_q_a.weight") else None}


def _write_query_rank(model: ModelShape) -> keys.Said:
    rank: int | None = keys.value_of(model, "mla.q_lora_rank")
    # llama.cpp takes a model for one that projects queries in one step by its number of layers
    is_lite = model.num_layers in (26, 27) or (model.num_layers, model.vocab_size) == (48, 128256)
    if (rank is None) != is_lite:
        how = "one step" if rank is None else "two steps"
        raise keys.refused(model, f"of {model.num_layers} layers that projects queries in {how}")
    return {} if rank is None else {"attention.q_lora_rank": rank}


_QUERY_RANK = keys.GgufEntry(("mla.q_lora_rank",), ("attention.q_lora_rank",), _read_query_rank, _write_query_rank)


def _read_latent(file: Described) -> Fields:
    rank = file.count("attention.kv_lora_rank")
    file.expect("attention.key_length", rank + file.count("rope.dimension_count"))
    file.expect("attention.value_length", rank)
    return {"mla.kv_lora_rank": rank}


_LATENT = keys.GgufEntry(
    ("mla.kv_lora_rank",),
    ("attention.key_length", "attention.value_length"),
    _read_latent,
    lambda model: {
        "attention.key_length": keys.value_of(model, "mla.kv_lora_rank") + model.rotary_size,
        "attention.value_length": keys.value_of(model, "mla.kv_lora_rank"),
    },
)
"""What is a head to llama.cpp."""
LATENT_RANK = keys.integer("mla.kv_lora_rank", "attention.kv_lora_rank")
LATENT_HEADS = keys.GgufEntry(
    ("mla.qk_head_dim", "mla.v_head_dim"),
    ("attention.key_length_mla", "attention.value_length_mla"),
    lambda file: {
        "mla.qk_head_dim": file.count("attention.key_length_mla") - file.count("rope.dimension_count"),
        "mla.v_head_dim": file.count("attention.value_length_mla"),
    },
    lambda model: {
        "attention.key_length_mla": keys.value_of(model, "mla.qk_head_dim") + model.rotary_size,
        "attention.value_length_mla": keys.value_of(model, "mla.v_head_dim"),
    },
)

LATENT_TURNED = keys.integer("mla.qk_pos_emb_head_dim", "rope.dimension_count")


_HEADS = replace(
    keys.HEADS,
    read=lambda file: dict.fromkeys(keys.HEADS.fields, file.count("attention.head_count", least=1)),
    write=lambda model: {"attention.head_count": model.num_attention_heads, keys.HEADS_KV: 1},
)
"""To llama.cpp all heads have one key: the latent."""


def _latent_attention(
    architecture: str,
    function: str | None,
    *behind: keys.GgufEntry,
    group_scores: int = 2,
    layers: keys.GgufEntry = keys.DECODER_LAYERS,
    query_rank: keys.GgufEntry = _QUERY_RANK,
    head_first: bool = True,
    **computed: Any,
) -> GgufFamily:
    """Latent attention and experts, whose scores `function` makes, if a file says it;
    `head_first`: the converter writes _LATENT so."""
    return GgufFamily(
        architecture,
        rows=_ROWS,
        keys=base_keys(
            *expert_keys.EXPERT_COUNTS,
            expert_keys.groups(group_scores),
            *((expert_keys.scored_by(function),) if function else ()),
            *((_LATENT,) if head_first else ()),
            layers=layers,
            heads=_HEADS,
            head_size=None,
        ),
        more=(
            expert_keys.LEADING_DENSE,
            keys.VOCABULARY,
            query_rank,
            LATENT_RANK,
            *(() if head_first else (_LATENT,)),
            LATENT_HEADS,
            expert_keys.EXPERT_SIZE,
            expert_keys.SHARED_COUNT,
            expert_keys.WEIGHTS_SCALE,
            expert_keys.NORMALISED,
            LATENT_TURNED,
            rope_keys.LOG_MULTIPLIER,
            *behind,
        ),
        computed={"kv_channels": keys.SameAs("mla.v_head_dim"), **expert_keys.TWO_SCORES, **computed},
        scalings=rope_keys.OF_LATENT,
        of_scaling=rope_keys.mscales(),
    )


def _read_without_experts(file: Described) -> Fields:
    file.expect("leading_dense_block_count", file.decoder_layers())
    file.expect("expert_feed_forward_length", file.count("feed_forward_length"))
    file.expect("expert_shared_count", 0)
    return {}


_WITHOUT_EXPERTS = keys.GgufEntry(
    (),
    ("leading_dense_block_count", "expert_feed_forward_length", "expert_shared_count"),
    _read_without_experts,
    lambda model: {"expert_feed_forward_length": model.ffn_hidden_size, "expert_shared_count": 0},
)


def deepseek2(function: str, **how: Any) -> GgufFamily:
    """One of llama.cpp's `deepseek2`."""
    found = _latent_attention("deepseek2", function, **how)
    return replace(found, ignored=keys.NO_PREDICTION, of_scaling=rope_keys.mscales(any_number=True))


# Sparse attention, which indexers choose the keys for

_INDEXER = (
    keys.integer("dsa.n_heads", "attention.indexer.head_count"),
    keys.integer("dsa.head_dim", "attention.indexer.key_length"),
    keys.integer("dsa.topk", "attention.indexer.top_k"),
)


def sparse_attention(architecture: str, *indexers: keys.GgufEntry, interleaved: bool, **computed: Any) -> GgufFamily:
    """The same with indexers, which choose the keys that a query sees."""
    found = _latent_attention(
        architecture,
        "sigmoid",
        keys.PREDICTION_LAYERS,
        *_INDEXER,
        *indexers,
        layers=keys.LAYERS_AND_PREDICTION,
        query_rank=keys.integer("mla.q_lora_rank", "attention.q_lora_rank"),
        **{"moe.expert_bias": True, "dsa.rope_interleaved": interleaved, **computed},
    )
    return replace(found, rows=_ROWS_WITH_INDEXERS)


def _has_experts(file: Described) -> bool:
    return bool(file.count("expert_count", 0))


def _is_v3(file: Described) -> bool:
    """By how experts are scored: by a softmax if a file says nothing, but of GLM-4.7-Flash (deepseek2.cpp)."""
    of_glm = file.rows("token_embd.weight") == 154880 and file.decoder_layers() in (47, 48)
    silent = file.said("expert_gating_func") is None
    return expert_keys.is_scored_by("sigmoid", file) or (silent and of_glm)


_ALL_DENSE = keys.write_only(lambda model: {"leading_dense_block_count": model.num_layers})
_FUSED_EXPERTS = [
    rows.GgufRow(f"model.layers.{{layer}}.mlp.experts.{hf}[{{expert}}]", (rows.stack(gguf),))
    for hf, gguf in {"gate_up_proj": "ffn_gate_up_exps", "down_proj": "ffn_down_exps"}.items()
]


def _read_query_length(file: Described) -> Fields:
    if file.number("attention.temperature_scale", 0.0):
        file.expect("attention.temperature_length", file.count("rope.scaling.original_context_length"))
    return {}


_QUERY_SCALING = (
    rope_keys.QUERY_SCALING,
    keys.GgufEntry(
        (),
        ("attention.temperature_length",),
        _read_query_length,
        lambda model: (
            {"attention.temperature_length": (model.rope_scaling or {})[rope_keys.ORIGINAL]}
            if model.query_scaling_beta
            else {}
        ),
    ),
)
"""Which llama.cpp reads, and its converter leaves out."""

_V3 = deepseek2("sigmoid", **{"moe.expert_bias": True})

FAMILIES: Mapping[str, GgufFamily] = {
    "deepseek": GgufFamily(
        "deepseek",
        rows=[*rows.DECODER_IN_PAIRS, *rows.MLP, *rows.ROUTER, *rows.EXPERTS, *rows.SHARED_EXPERTS],
        keys=base_keys(*expert_keys.EXPERT_COUNTS),
        more=(
            rope_keys.TURNED,
            rope_keys.SAYS_UNSCALED,
            expert_keys.LEADING_DENSE,
            keys.VOCABULARY,
            expert_keys.EXPERT_SIZE,
            expert_keys.WEIGHTS_SCALE,
            expert_keys.SHARED_COUNT,
        ),
        computed={"moe.pre_softmax": True},
        scalings=rope_keys.UNSCALED_ALONE,
    ),
    "deepseek_v2": replace(
        deepseek2("softmax", group_scores=1, **{"moe.pre_softmax": True}),
        recognises=lambda file: _has_experts(file) and not _is_v3(file),
    ),
    "deepseek_v3": replace(_V3, recognises=lambda file: _has_experts(file) and _is_v3(file)),
    "kimi_k2": replace(_V3, recognises=lambda file: False),
    "youtu": replace(
        _V3,
        keys=base_keys(_LATENT, heads=_HEADS, head_size=None),
        more=(
            *(_ALL_DENSE, keys.VOCABULARY, _QUERY_RANK, LATENT_RANK, LATENT_HEADS, _WITHOUT_EXPERTS, LATENT_TURNED),
            rope_keys.LOG_MULTIPLIER,
        ),
        computed={"kv_channels": keys.SameAs("mla.v_head_dim")},
        reads=(keys.NO_EXPERTS,),
        ignored={},
        recognises=lambda file: not _has_experts(file),
    ),
    "mistral4": replace(
        _latent_attention("mistral4", None, *_QUERY_SCALING, layers=keys.LAYERS),
        rows=[
            row for row in (*_ROWS, *_FUSED_EXPERTS) if row not in (rows.EXPERT_BIAS, *rows.EXPERTS, *rows.PREDICTION)
        ],
    ),
    "deepseek_v32": sparse_attention("deepseek32", interleaved=False, **{"dsa.layers": keys.in_all_layers(True)}),
}
