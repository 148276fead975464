"""MiniMax-M3: gpt-oss' gated MLPs, DeepSeek-V3's experts without groups, and in most layers an indexer that chooses the
blocks of keys that a query sees.

Traps: norms store their factor less one; `intermediate_size` is an expert's; gate and up do not alternate; the router
is FP32 as released. Published files have words of their own in config.json (`sparse_attention_config`,
`moe_layer_freq`), which transformers reads and does not write, and other names of tensors than its class. Published is
the wrapper alone; of a text model by itself transformers reads the names of its class and no others. It passes over
`rotary_dim`, by which engines go. config.json counts prediction layers, of which no file has tensors.
"""

from collections.abc import Mapping
from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import listed_flags, listed_layers
from precisionctl.architectures.param_map import Architecture, Either, Row, only_in, renamed
from precisionctl.architectures.rearrangements import GAMMA, SAME
from precisionctl.architectures.rope import rope_with_dim
from precisionctl.architectures.shared import deepseek_keys, llama_rows as llama, moe_rows as moe
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape

_ABSENT = {"num_key_value_heads": 4, "head_dim": 128}
"""What its class takes for keys that are not there."""

_HF, _INDEXER = "model.layers.{layer}.self_attn.", "decoder.layers.{layer}.self_attention.core_attention.indexer."
_INDEXERS = (
    Row(
        f"{_HF}indexer.q_proj.weight",
        f"{_INDEXER}linear_q.weight",
        ("msa.query_size", "hidden_size"),
        layers="indexed",
    ),
    Row(
        f"{_HF}indexer.k_proj.weight",
        f"{_INDEXER}linear_k.weight",
        ("msa.head_dim", "hidden_size"),
        layers="indexed",
    ),
    Row(f"{_HF}indexer.q_norm.weight", f"{_INDEXER}q_norm.weight", ("msa.head_dim",), GAMMA, layers="indexed"),
    Row(f"{_HF}indexer.k_norm.weight", f"{_INDEXER}k_norm.weight", ("msa.head_dim",), GAMMA, layers="indexed"),
)

_PUBLISHED_INDEXERS = tuple(  # vLLM computes their projections and those of queries, keys and values as one
    replace(row, only_exported="linear" in row.megatron) for row in renamed(_INDEXERS, {"indexer.": "index_"})
)

_JOINED_SHARED = replace(
    moe.SHARED_EXPERTS[0],
    names="model.layers.{layer}.mlp.shared_experts.gate_up_proj.weight",
    rearrangement=SAME,
)
_BLOCK = {
    "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
    ".mlp.": ".block_sparse_moe.",
}
_NUMBERED = moe.experts("model.layers.{layer}.mlp.experts")

_ROWS = llama.model_rows(
    *llama.ATTENTION_NORM,
    *llama.QKV_LINEAR,
    *llama.QK_NORMS,
    *llama.PROJ,
    Either(_INDEXERS, for_engines=_PUBLISHED_INDEXERS),
    *llama.MLP_NORM,
    Either(only_in("dense", llama.JOINED_MLP[:1]), for_engines=llama.MLP[:1]),
    llama.DOWN,
    *moe.MOE_NORM,
    Either(
        (*moe.WIDE_ROUTER, *moe.EXPERT_BIAS, _JOINED_SHARED, *moe.SHARED_EXPERTS[1:], *moe.FUSED),
        for_engines=renamed((*moe.WIDE_ROUTER, *moe.EXPERT_BIAS, *moe.SHARED_EXPERTS, *_NUMBERED), _BLOCK),
    ),
)

_ATTENTIONS = {"full_attention": False, "minimax_m3_sparse": True}
_SIZES = {
    "index_n_heads": ("sparse_num_index_heads", "n_heads", 4),
    "index_head_dim": ("sparse_index_dim", "head_dim", 128),
    "index_block_size": ("sparse_block_size", "block_size", 128),
    "index_topk_blocks": ("sparse_topk_blocks", "topk_blocks", 16),
    "index_local_blocks": ("sparse_local_block", "local_blocks", 1),
}
"""Of an indexer, in transformers' words: the published word, the field, and what its class takes where none is said."""

_FIXED = (
    keys.only("use_sparse_attention", True),
    keys.only("sparse_score_type", "max"),
    keys.only("sparse_init_block", 0),
)


def _by_layer(
    config: keys.Config, kinds: Mapping[str, bool], key: str, flags: object, flags_key: str
) -> list[bool] | None:
    """Whether each layer is of a kind, as transformers' key lists them or the published flags do; None if neither."""
    listed, number = listed_layers(config, kinds, key), keys.layers(config)
    if flags is None:
        return listed
    flagged = listed_flags(flags, flags_key, number)
    if listed not in (None, flagged):
        raise DamagedCheckpoint(f"{key} and {flags_key} say different layers", do=f"Say {flags_key} alone.")
    return flagged


def _read_experts(config: keys.Config) -> keys.Fields:
    found = _by_layer(config, deepseek_keys.MLPS, "mlp_layer_types", config.get("moe_layer_freq"), "moe_layer_freq")
    return {"moe.layer_freq": (True,) * keys.layers(config) if found is None else tuple(found)}


def _read_indexer(config: keys.Config) -> keys.Fields:
    said = keys.section(config, "sparse_attention_config")
    for only in _FIXED:
        only.read({"model_type": config.get("model_type"), **said})
    flags = said.get("sparse_attention_freq")
    indexed = _by_layer(config, _ATTENTIONS, "layer_types", flags, "sparse_attention_freq") or []
    if not any(indexed):
        return {}
    off = said.get("sparse_disable_index_value")
    if off is not None and off != [int(each) for each in indexed]:
        what = f"sparse_disable_index_value={shown(off)}: an indexer with values"
        raise UnknownArchitecture(what, do="Its table was made for 1 in each layer with an indexer.")
    sizes = {}
    for key, (published, field, absent) in _SIZES.items():
        here = {key: absent, **config}
        if said.get(published) is not None:
            here[key] = said[published]
            if config.get(key, here[key]) != here[key]:
                raise DamagedCheckpoint(f"{key} and {published} differ", do=f"Say {published} alone.")
        sizes[f"msa.{field}"] = (keys.count if key == "index_local_blocks" else keys.size)(here, key)
    return {**sizes, "msa.layers": tuple(indexed)}


def _write_indexer(model: ModelShape) -> keys.Config:
    if model.msa is None:
        return {}
    flags = [int(each) for each in model.msa.layers]
    return {
        "sparse_attention_config": {
            **{name: value for only in _FIXED for name, value in only.write(model).items()},
            **{published: getattr(model.msa, field) for published, field, _ in _SIZES.values()},
            "sparse_attention_freq": flags,
            "sparse_disable_index_value": flags,
        }
    }


ARCHITECTURE = Architecture(
    model_types={"minimax_m3_vl_text": "MiniMaxM3VLForCausalLM"},
    rows=_ROWS,
    config=(
        *keys.SIZES_BESIDE_MLP,
        keys.Key("ffn_hidden_size", "dense_intermediate_size", 12288),
        keys.heads(**_ABSENT),
        keys.activation("hidden_act", {"swigluoai": "quick_gelu", "silu": "quick_gelu"}, "silu"),
        keys.only("swiglu_alpha", 1.702),
        keys.only("swiglu_beta", 1.0),
        keys.Key("activation_clamp", "swiglu_limit", 7.0),
        keys.always("glu_offset", 1.0),
        keys.only("use_gemma_norm", True),
        keys.always("zero_centered_gamma", True),
        keys.always("hf_zero_centered_gamma", True),
        keys.only("use_qk_norm", True, "qk_layernorm", True),
        keys.only("qk_norm_type", "per_head"),
        keys.only("attention_output_gate", False),
        keys.Key("moe.num_experts", "num_local_experts", 128, synonym="num_experts"),
        keys.Key("moe.topk", "num_experts_per_tok", 4),
        keys.Key("moe.ffn_hidden_size", "intermediate_size", 3072),
        keys.only("n_shared_experts", 1),
        keys.Key("moe.shared_ffn_hidden_size", "shared_intermediate_size", 3072),
        keys.Rule(
            ("mlp_layer_types", "moe_layer_freq"),
            _read_experts,
            lambda model: {"moe_layer_freq": [int(model.has_experts(layer)) for layer in range(model.num_layers)]},
        ),
        keys.only("scoring_func", "sigmoid"),
        keys.only("use_routing_bias", True),
        keys.always("moe.score_function", "sigmoid"),
        keys.always("moe.expert_bias", True),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 2.0),
        keys.only("use_index_cache", False),  # vLLM's indexers that serve the layers after them
        keys.Rule(("sparse_attention_config", "layer_types", *_SIZES), _read_indexer, _write_indexer),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope_with_dim(_ABSENT["head_dim"], heeds_dim=False),
        keys.tied(False),
    ),
    names_by="this project",
)
