"""DeepSeek-V4: keys of several tokens beside those of a window, several residual streams, and experts that a table
chooses in the first layers. Names in Megatron are those of Megatron-Core's dev branch
(transformer/experimental_attention_variant/csa.py and deepseek_v4_hybrid_attention.py, hyper_connection.py), as
Megatron-Bridge and mcore-bridge fill them.

Traps: layers with compressed keys have another rotary base, and alone a scaling, by which transformers magnifies
nothing unless config.json says so; what turns are the last channels of a head, and neighbouring pairs. Released files
list one more ratio, for the layer of multi-token prediction, than there are layers. Where windows overlap, projections
have twice as many rows. `norm` is that of compressed keys in published files, and that of keys, too, in transformers'.
The output projection by groups has no `.weight` in Megatron.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, Either, Row, renamed, when
from precisionctl.architectures.rearrangements import GAMMA, GATE_UP, VOCABULARY
from precisionctl.architectures.rope import PARAMETERS, beside_kinds, read_kind, rope_type
from precisionctl.architectures.row_layers import COMPRESSED, Layers
from precisionctl.architectures.shared import hyper_connection_rows as streams, llama_rows as llama, moe_rows as moe
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_parts import MOST_LAYERS, check_count, real
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.sparse_parts import CSA
from precisionctl.param import COLUMNS, GATED_ROWS, ROWS
from precisionctl.sizes import counted

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
    *streams.hyper_connection(f"{_HF}hc_attn_", "self_attention", _SCALES),
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
    *streams.hyper_connection(f"{_HF}hc_ffn_", "mlp", _SCALES),
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
    *streams.head("hc_head_", "decoder."),
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
    *streams.head("mtp.{mtp}.hc_head_", "mtp.layers.{mtp}."),
)

_KINDS = {"sliding_attention": "W", "compressed_sparse_attention": "C", "heavily_compressed_attention": "H"}
_BY_RATIO = {ratio: kind for kind, ratio in CSA.RATIOS.items()}
_ROUTERS = {"hash_moe": True, "moe": False}
_RATES = {"compressed_sparse_attention": CSA.RATIOS["C"], "heavily_compressed_attention": CSA.RATIOS["H"]}


def _count(config: keys.Config) -> int:
    return keys.layers(config, absent=43)


def _listed(config: keys.Config, key: str, known: Mapping[Any, Any]) -> list[Any] | None:
    """What is listed under a key of each layer, as transformers takes it: what is beyond the last one does not count.
    None where there is no list."""
    if config.get(key) is None:
        return None
    count = _count(config)
    listed = keys.as_list(config[key], key, counted(count, "layer"), range(count, MOST_LAYERS + 1))
    for each in listed[:count]:
        if not isinstance(each, str | int) or each not in known:
            raise UnknownArchitecture(f"layers of type {shown(each)} in {key}")
    return [known[each] for each in listed[:count]]


def _read_layers(config: keys.Config) -> keys.Fields:
    count = _count(config)
    for key, rate in {"compress_rate_csa": "C", "compress_rate_hca": "H"}.items():
        if config.get(key) not in (None, CSA.RATIOS[rate]):
            raise UnknownArchitecture(f"{key}={shown(config[key])}")
    listed = _listed(config, "layer_types", _KINDS), _listed(config, "compress_ratios", _BY_RATIO)
    if None not in listed and listed[0] != listed[1]:
        said = shown(config["compress_ratios"])
        what = f"compress_ratios is {said}, and transformers goes by layer_types, which differ"
        raise DamagedCheckpoint(what, do="Engines go by compress_ratios: say the same in both.")
    kinds = listed[0] or listed[1]
    if kinds is None:
        kinds = ["H"] * min(count, 2) + ["C" if layer % 2 else "H" for layer in range(count - 2)]
    routers, hashed = _listed(config, "mlp_layer_types", _ROUTERS), config.get("num_hash_layers")
    if hashed is not None:
        check_count(hashed, "num_hash_layers", MOST_LAYERS)
    hashed = min(3 if hashed is None else hashed, count)
    if routers is not None:
        if config.get("num_hash_layers") is not None and hashed != sum(routers):
            what = f"num_hash_layers is {hashed}, and transformers goes by mlp_layer_types, which differ"
            raise DamagedCheckpoint(what, do="Engines go by num_hash_layers: say the same in both.")
        hashed = sum(routers)
        if not all(routers[:hashed]):
            raise UnknownArchitecture("mlp_layer_types: hash_moe after moe")
    return {
        "num_layers": count,
        "csa.pattern": "".join(kinds),
        "moe.n_hash_layers": hashed,
        "moe.layer_freq": (True,) * count,
    }


def _write_layers(model: ModelShape) -> keys.Config:
    if model.csa is None or model.moe is None:
        return {}
    hashed, names = model.moe.n_hash_layers, {kind: name for name, kind in _KINDS.items()}
    return {
        "num_hidden_layers": model.num_layers,
        "layer_types": [names[kind] for kind in model.csa.pattern],
        "compress_ratios": model.csa.ratios(model.mtp_num_layers),
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (model.num_layers - hashed),
        "num_hash_layers": hashed,
    }


_BASE, _COMPRESSED_BASE, _TURNING = 10000.0, 160000.0, 64 / 512
_KEYS_OF_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "compress_rope_theta", "partial_rotary_factor")


def _read_rope(config: keys.Config) -> keys.Fields:
    config = {"max_position_embeddings": 1 << 20, "head_dim": 512} | dict(beside_kinds(config))
    head = keys.size(config, "head_dim")
    said = keys.section(config, "rope_scaling") or keys.section(config, "rope_parameters")
    kinds = [keys.section(said, kind) for kind in ("main", "compress") if said.get(kind) is not None]
    if len(kinds) == 2:
        main, compressed = ({"partial_rotary_factor": 1.0, **each} for each in kinds)
    else:
        turning = config.get("partial_rotary_factor")
        if turning is None:
            given = config.get("qk_rope_head_dim")
            turning = _TURNING if given is None else real(given, "qk_rope_head_dim") / head
        main = {"rope_theta": config.get("rope_theta", _BASE), "partial_rotary_factor": turning}
        compressed = {name: value for name, value in said.items() if name in PARAMETERS}
        compressed |= {"rope_theta": config.get("compress_rope_theta", _COMPRESSED_BASE)}
        compressed |= {"partial_rotary_factor": turning}
        if rope_type(compressed) == "yarn":
            compressed = {"attention_factor": 1.0} | compressed
    in_window, fields = (read_kind(config, dict(each), _BASE, 1.0) for each in (main, compressed))
    if in_window["rope_scaling"] or in_window["rotary_percent"] != fields["rotary_percent"]:
        raise UnknownArchitecture("rotary embeddings of a window that are scaled, or turn another part")
    scaling = fields["rope_scaling"]
    if scaling and scaling["rope_type"] != "yarn":
        raise UnknownArchitecture(f"rotary scaling of type {scaling['rope_type']}")
    turn = config.get("qk_rope_head_dim")
    if turn is not None and turn != round(head * fields["rotary_percent"]):
        what = f"qk_rope_head_dim is {shown(turn)}, and transformers goes by partial_rotary_factor, which differs"
        raise DamagedCheckpoint(what, do="Engines go by qk_rope_head_dim: say the same in both.")
    return {**fields, "rotary_base_local": in_window["rotary_base"]}


def _write_rope(model: ModelShape) -> keys.Config:
    turning = {"rope_type": "default", "partial_rotary_factor": model.rotary_percent}
    main = turning | {"rope_theta": model.rotary_base_local}
    compressed = {**turning, **(model.rope_scaling or {}), "rope_theta": model.rotary_base}
    return {
        "rope_theta": model.rotary_base_local,
        "compress_rope_theta": model.rotary_base,
        "partial_rotary_factor": model.rotary_percent,
        "qk_rope_head_dim": model.rotary_size,
        "rope_scaling": model.rope_scaling,  # which engines read, and transformers before the others
        "rope_parameters": {"main": main, "compress": compressed},
    }


ARCHITECTURE = Architecture(
    model_types={"deepseek_v4": "DeepseekV4ForCausalLM"},
    rows=(
        Either(
            (*_DECODER, *_EXPERTS, _FINAL_NORM),
            in_memory=(*renamed(_DECODER, _IN_MEMORY), *moe.FUSED, replace(_FINAL_NORM, names="model.norm.weight")),
            other=(*renamed((*_DECODER, *_EXPERTS), _SAVED), replace(_FINAL_NORM, names="model.norm.weight")),
        ),
        Either((_OUTPUT,), in_memory=(replace(_OUTPUT, names="lm_head.weight"),)),
        *_PREDICTION,
    ),
    config=(
        keys.Rule(
            ("vocab_size",),
            lambda config: keys.VOCABULARY.read({"vocab_size": 129280, **config}),
            keys.VOCABULARY.write,
        ),
        keys.Rule(
            (
                *("num_hidden_layers", "layer_types", "compress_ratios", "mlp_layer_types", "num_hash_layers"),
                *("compress_rate_csa", "compress_rate_hca"),
            ),
            _read_layers,
            _write_layers,
        ),
        keys.only("compress_rates", _RATES),
        keys.synonyms({"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"}),
        keys.Key("hidden_size", "hidden_size", 4096),
        keys.Key("max_position_embeddings", "max_position_embeddings", 1 << 20),
        keys.Rule(
            ("moe_intermediate_size",),
            lambda config: dict.fromkeys(
                ("ffn_hidden_size", "moe.ffn_hidden_size", "moe.shared_ffn_hidden_size"),
                keys.size(config, "moe_intermediate_size", absent=2048),
            ),
            lambda model: {"moe_intermediate_size": model.moe and model.moe.ffn_hidden_size},
        ),
        keys.only("n_shared_experts", 1),
        keys.Key("num_attention_heads", "num_attention_heads", 64),
        keys.only("num_key_value_heads", 1, "num_query_groups", 1),
        keys.Key("kv_channels", "head_dim", 512),
        keys.Key("csa.q_lora_rank", "q_lora_rank", 1024),
        keys.Key("csa.o_groups", "o_groups", 8),
        keys.Key("csa.o_lora_rank", "o_lora_rank", 1024),
        keys.Key("csa.n_heads", "index_n_heads", 64),
        keys.Key("csa.head_dim", "index_head_dim", 128),
        keys.Key("csa.topk", "index_topk", 512),
        keys.Key("csa.window_size", "sliding_window", 128),
        keys.Key("mhc.num_residual_streams", "hc_mult", 4),
        keys.Key("mhc.mhc_sinkhorn_iterations", "hc_sinkhorn_iters", 20),
        keys.Key("mhc.epsilon", "hc_eps", 1e-6),
        keys.Key("moe.num_experts", "n_routed_experts", 256),
        keys.Key("moe.topk", "num_experts_per_tok", 6),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.5),
        keys.only("scoring_func", "sqrtsoftplus", "moe.score_function", "sqrtsoftplus"),
        keys.only("topk_method", "noaux_tc"),
        keys.only("norm_topk_prob", True),
        keys.always("moe.expert_bias", True),
        keys.SILU,
        keys.Key("activation_clamp", "swiglu_limit", 10.0),
        keys.only("attention_bias", False),
        keys.only("mlp_bias", False),
        keys.Rule((*_KEYS_OF_ROPE, "qk_rope_head_dim"), _read_rope, _write_rope),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        keys.Key("mtp_num_layers", "num_nextn_predict_layers", 1),
        keys.tied(False),
    ),
    aliases=(),
)
