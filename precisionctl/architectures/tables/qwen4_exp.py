"""Qwen4-Exp: Qwen3.5's gated delta nets, gated attention and experts between several residual streams, an indexer that
chooses blocks of keys by their average, and embeddings of n-grams.

Traps: blocks have no norms, as streams are normalised where they are read. A layer's table of n-grams is one tensor in
memory and many on disk, as `torch.chunk` cuts it. Published files call layers with an indexer `full_attention`.
`eos_token_id` is a part of the model: it stands for what is before a text. Of the layers of multi-token prediction,
which transformers passes over, no names are known; in the wrapper they travel with its towers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import numbered_layers
from precisionctl.architectures.param_map import Architecture, Either, Row, only_in
from precisionctl.architectures.rearrangements import BY_KIND, GAMMA, Chunks
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.shared.delta_net_keys import BESIDE_LAYERS, KINDS, delta_net_layers
from precisionctl.architectures.shared.delta_net_rows import SPARSE, delta_net
from precisionctl.architectures.shared.moe_keys import scores
from precisionctl.architectures.tables.qwen3_5 import IN_PROJ
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_parts import LARGEST
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import COLUMNS

_HF, _MEGATRON = "model.layers.{layer}.", "decoder.layers.{layer}."
_NORMS_OF_BLOCKS = ("input_layernorm.weight", "post_attention_layernorm.weight")


def _without_norms(rows: tuple[Row | Either, ...]) -> Iterator[Row | Either]:
    return (row for row in rows if isinstance(row, Either) or not row.hf[0].endswith(_NORMS_OF_BLOCKS))


_TO_READ = {
    "input_mix_weight_down": ("mhc.lowrank", "streams_size"),
    "input_mix_weight_up": ("streams_size", "mhc.lowrank"),
}
_TO_READ_AND_ADD = {**_TO_READ, "block_inject_weight": ("mhc.num_residual_streams", "streams_size")}


def _streams(hf: str, megatron: str, weights: Mapping[str, tuple[str, str]]) -> tuple[Row, ...]:
    """What joins a block to streams of which each channel has a weight to read it by, or makes one stream of them.
    Megatron has none such: names are transformers', in its hyper-connection."""
    return (
        Row(f"{hf}hc_norm.weight", f"{megatron}hc_norm.weight", ("streams_size",), GAMMA),
        *(Row(f"{hf}{name}.weight", f"{megatron}{name}.weight", sizes) for name, sizes in weights.items()),
    )


_INDEXER = "self_attention.core_attention.indexer."
_INDEXERS = only_in(
    "indexed",
    (
        Row(
            f"{_HF}self_attn.indexer.index_qk_proj.weight",
            f"{_MEGATRON}{_INDEXER}linear_qk.weight",
            ("msa.query_key_size", "hidden_size"),
        ),
        *(
            Row(
                f"{_HF}self_attn.indexer.{part}_layernorm.weight",
                f"{_MEGATRON}{_INDEXER}{part}_norm.weight",
                ("msa.head_dim",),
                GAMMA,
            )
            for part in ("q", "k")
        ),
    ),
)

_HASHES = {"layer_multipliers": "ngram_size", "ngram_heads_vocab_sizes": "heads", "ngram_heads_offsets": "heads"}
_NGRAMS = only_in(
    "ngrams",
    (
        *(
            Row(
                f"{_HF}ple.ple_embedding.{name}",
                f"{_MEGATRON}ple.ple_embedding.{name}",
                (f"ple.{number}",),
                integers_below="ple.multipliers_below" if name == "layer_multipliers" else "ple.rows_below",
            )
            for name, number in _HASHES.items()
        ),
        Row(f"{_HF}ple.key_proj.weight", f"{_MEGATRON}ple.key_proj.weight", ("streams_size", "ple.embed_dim")),
        Row(f"{_HF}ple.value_proj.weight", f"{_MEGATRON}ple.value_proj.weight", ("hidden_size", "ple.embed_dim")),
        *(
            Row(f"{_HF}ple.norm_{of}.weight", f"{_MEGATRON}ple.norm_{of}.weight", ("streams_size",), GAMMA)
            for of in ("key", "query", "conv")
        ),
        Row(f"{_HF}ple.conv1d.weight", f"{_MEGATRON}ple.conv1d.weight", ("streams_size", 1, "ple.conv_kernel_dim")),
    ),
)


def _tables(model: ModelShape) -> tuple[Either, ...]:
    """Of n-grams: each layer's has a size of its own."""
    if model.ple is None:
        return ()
    tables = []
    for layer, has_ngrams in enumerate(model.ple.layers):
        if not has_ngrams:
            continue
        name = "layers.{layer}.ple.ple_embedding.ngram_embedding."
        rows = model.ple.table_rows(layer)
        high = -(-rows // model.ple.split_parts)
        parts = -(-rows // high)
        whole = Row(
            f"model.{name}weight", f"decoder.{name}weight", (rows, "ple.head_dim"), parallel=COLUMNS, numbers=(layer,)
        )
        shards = tuple(f"model.{name}shard_{part}.weight" for part in range(parts))
        tables.append(Either((replace(whole, names=shards, rearrangement=Chunks(parts)),), in_memory=(whole,)))
    return tuple(tables)


_INDEXER_KEYS = (
    *("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim"),
    *("indexer_budget", "indexer_compress_ratio"),
)


def _read_indexer(config: keys.Config) -> keys.Fields:
    with_delta_net = _LAYERS.read(config)["gdn.layers"]
    if all(with_delta_net):
        return {}
    number, of_keys, channels, budget, ratio = (keys.size(config, key) for key in _INDEXER_KEYS)
    if of_keys != 1:
        what = f"no {config.get('model_type')} known here has indexer_kv_heads={of_keys}"
        raise UnknownArchitecture(what, do="Its table was made for 1.")
    if budget % ratio:
        what = f"indexer_budget is {budget}, which no whole number of blocks of {ratio} tokens fills"
        raise DamagedCheckpoint(what)
    return {
        "msa.n_heads": number,
        "msa.head_dim": channels,
        "msa.block_size": ratio,
        "msa.topk_blocks": budget // ratio,
        "msa.local_blocks": 0,
        "msa.layers": tuple(not each for each in with_delta_net),
        "msa.averaged": True,
    }


def _write_indexer(model: ModelShape) -> keys.Config:
    msa = model.msa
    if msa is None:
        return {}
    sizes = (msa.n_heads, 1, msa.head_dim, msa.topk_blocks * msa.block_size, msa.block_size)
    return dict(zip(_INDEXER_KEYS, sizes, strict=True))


_LAYERS = delta_net_layers(KINDS | dict.fromkeys(("indexed_attention", "qwen_sparse_attention"), False))
"""Beside the published words transformers', today's and that of 5.17."""

_NGRAM_KEYS = {  # field: key, and what its class takes where none is said
    "conv_kernel_dim": ("ple_conv_kernel_size", 4),
    "ngram_size": ("ngram_size", 3),
    "heads_per_ngram": ("heads_per_ngram", 8),
    "vocab_size_base": ("ngram_vocab_size_base", 20_000_000),
    "vocab_divisor": ("make_ngram_vocab_size_divisible_by", 128),
    "split_parts": ("split_ngram_parts", 512),
}


def _read_ngrams(config: keys.Config) -> keys.Fields:
    listed = config.get("ple_layer_ids")
    numbers = numbered_layers([] if listed is None else listed, "ple_layer_ids")  # counting from 1
    if not numbers:
        return {}
    with_ngrams = tuple(layer + 1 in numbers for layer in range(keys.layers(config)))
    with_delta_net = _LAYERS.read(config)["gdn.layers"]
    if sum(with_ngrams) < len(numbers) or any(has > net for has, net in zip(with_ngrams, with_delta_net, strict=True)):
        what = f"ple_layer_ids is {shown(listed)}, and not all of these are layers with linear attention"
        raise DamagedCheckpoint(what)
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if type(end) is not int or not 0 <= end < LARGEST:
        what = f"eos_token_id is {shown(config.get('eos_token_id'))}, and n-grams before it are made of it"
        raise DamagedCheckpoint(what)
    given = {**dict(_NGRAM_KEYS.values()), **config}
    embed_dim = keys.size(config, "hidden_size" if config.get("ple_embed_dim") is None else "ple_embed_dim")
    return {
        **{f"ple.{field}": keys.size(given, key) for field, (key, _) in _NGRAM_KEYS.items()},
        "ple.layers": with_ngrams,
        "ple.embed_dim": embed_dim,
        "ple.end_token": end,
    }


def _write_ngrams(model: ModelShape) -> keys.Config:
    if model.ple is None:
        return {}
    return {
        **{key: getattr(model.ple, field) for field, (key, _) in _NGRAM_KEYS.items()},
        "ple_layer_ids": [layer + 1 for layer, has in enumerate(model.ple.layers) if has],
        "ple_embed_dim": model.ple.embed_dim,
        "eos_token_id": model.ple.end_token,
    }


def _read_gate(config: keys.Config) -> keys.Fields:
    kind = "silu" if config.get("output_gate_type") is None else config["output_gate_type"]
    if kind not in ("silu", "sigmoid"):
        what = f"no {config.get('model_type')} known here has output_gate_type={shown(kind)}"
        raise UnknownArchitecture(what, do="Known: silu, sigmoid.")
    return {"gdn.output_gate": kind}


ARCHITECTURE = Architecture(
    model_types={"qwen4_exp_text": "Qwen4ExpForCausalLM"},
    rows=llama.model_rows(
        *_NGRAMS,
        *_streams(f"{_HF}attn_hyper_connection.", f"{_MEGATRON}self_attention_hyper_connection.", _TO_READ_AND_ADD),
        *_without_norms(delta_net(BY_KIND, *IN_PROJ, values=IN_PROJ[2:])),
        *_INDEXERS,
        *_streams(f"{_HF}mlp_hyper_connection.", f"{_MEGATRON}mlp_hyper_connection.", _TO_READ_AND_ADD),
        *_without_norms(SPARSE),
        ending=_streams("model.hyper_connection_mixer.", "decoder.hyper_connection_mixer.", _TO_READ),
    ),
    more_rows=_tables,
    config=(
        *keys.SIZES_BESIDE_MLP,
        *BESIDE_LAYERS,
        _LAYERS,
        rope(partial=True),
        keys.heads(num_key_value_heads=2, head_dim=256),
        keys.always("pre_layernorms", False),
        keys.Rule(
            ("output_gate_type",), _read_gate, lambda model: {"output_gate_type": model.gdn and model.gdn.output_gate}
        ),
        keys.Rule(_INDEXER_KEYS, _read_indexer, _write_indexer),
        keys.Key("ffn_hidden_size", "moe_intermediate_size", 512),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size", 512),
        keys.EVERY_LAYER_SPARSE,
        keys.Key("moe.num_experts", "num_experts", 512),
        keys.Key("moe.topk", "num_experts_per_tok", 10),
        keys.Key("moe.shared_ffn_hidden_size", "shared_expert_intermediate_size", 512),
        keys.always("moe.shared_expert_gate", True),
        scores(True),
        keys.Key("mhc.num_residual_streams", "hc_count", 4),
        keys.always("mhc.mhc_sinkhorn_iterations", None),
        keys.Key("mhc.lowrank", "hc_lowrank", 320),
        keys.Rule(
            ("ple_layer_ids", "ple_embed_dim", "eos_token_id", *(key for key, _ in _NGRAM_KEYS.values())),
            _read_ngrams,
            _write_ngrams,
        ),
    ),
    names_by="this project",
)
