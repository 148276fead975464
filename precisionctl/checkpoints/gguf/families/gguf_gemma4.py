"""Gemma 4, in whose layers with a window attention has other sizes.

Sources: llama.cpp's src/models/gemma4.cpp, and conversion/gemma.py (Gemma4Model).
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import NEEDED, Fields
from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.families.gguf_gemma import COMPUTED, FINAL_CAP
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_parts import GlobalAttention
from precisionctl.model.model_shape import ModelShape

_ROWS = [
    *rows.outside_layers(),
    rows.GgufRow("model.embed_tokens_per_layer.weight", ("per_layer_token_embd.weight",)),
    rows.GgufRow("model.per_layer_model_projection.weight", ("per_layer_model_proj.weight",)),
    rows.GgufRow("model.per_layer_projection_norm.weight", ("per_layer_proj_norm.weight",)),
    *rows.ATTENTION,
    *rows.MLP,
    *rows.in_layers(
        {
            **rows.FOUR_NORMS,
            **rows.QK_NORMS,
            "per_layer_input_gate": "inp_gate",
            "per_layer_projection": "proj",
            "post_per_layer_input_norm": "post_norm",
            "post_feedforward_layernorm_1": "post_ffw_norm_1",
            "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            "post_feedforward_layernorm_2": "post_ffw_norm_2",
            "router.proj": "ffn_gate_inp",
        }
    ),
    rows.in_layer("layer_scalar", "layer_output_scale.weight"),
    rows.in_layer("router.scale", "ffn_gate_inp.scale"),
    rows.in_layer("router.per_expert_scale", "ffn_down_exps.scale"),
    rows.GgufRow("model.layers.{layer}.experts.gate_up_proj[{expert}]", (rows.stack("ffn_gate_up_exps"),)),
    rows.GgufRow("model.layers.{layer}.experts.down_proj[{expert}]", (rows.stack("ffn_down_exps"),)),
]


def _read_heads(file: Described) -> Fields:
    windows, groups = file.flags(keys.PATTERN) or [], file.counts(keys.HEADS_KV)
    if all(windows):
        what = f"{file.architecture}.{keys.PATTERN} is {shown(windows)}"
        do = "Known are models with windows in some layers, of which it is a list."
        raise UnknownArchitecture(what, do=do)
    everywhere = windows.index(False)
    local = [number for number, window in zip(groups, windows, strict=True) if window]
    size, size_in_window = file.count("attention.key_length", least=1), file.count("attention.key_length_swa", least=1)
    for key, expected in (
        ("attention.value_length", size),
        ("attention.value_length_swa", size_in_window),
        ("rope.dimension_count", size),
        ("rope.dimension_count_swa", size_in_window),
    ):
        file.expect(key, expected)
    return {
        "num_query_groups": keys.one_of(file, keys.HEADS_KV, local or groups),
        "kv_channels": size_in_window,
        "global_attention.num_query_groups": groups[everywhere],
        "global_attention.kv_channels": size,
        "global_attention.keys_are_values": not file.has(f"blk.{everywhere}.attn_v.weight"),
    }


def _everywhere(model: ModelShape) -> GlobalAttention:
    """What layers without a window have."""
    own = model.global_attention or GlobalAttention()
    return replace(
        own,
        num_query_groups=own.num_query_groups or model.num_query_groups,
        kv_channels=own.kv_channels or model.kv_channels,
    )


def _write_groups(model: ModelShape) -> keys.Said:
    own = _everywhere(model).num_query_groups
    if own == model.num_query_groups:
        return {keys.HEADS_KV: own}
    windows = model.windows
    return {keys.HEADS_KV: [model.num_query_groups if window else int(own or 0) for window in windows]}


_HEADS = keys.GgufEntry(
    (
        *("num_query_groups", "kv_channels", "global_attention.num_query_groups"),
        *("global_attention.kv_channels", "global_attention.keys_are_values"),
    ),
    (
        keys.HEADS_KV,
        *("attention.key_length", "attention.key_length_swa", "attention.value_length", "attention.value_length_swa"),
        *("rope.dimension_count", "rope.dimension_count_swa"),
    ),
    _read_heads,
    _write_groups,
)
_HEAD_SIZE = keys.write_only(
    lambda model: dict.fromkeys(
        ("attention.key_length", "attention.value_length"), _everywhere(model).kv_channels or 0
    ),
)
_LOCAL_SIZE = keys.write_only(
    lambda model: dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), model.kv_channels),
)
_TURNED = keys.write_only(
    lambda model: {
        "rope.dimension_count": _everywhere(model).kv_channels or 0,
        "rope.dimension_count_swa": model.kv_channels,
    },
)
"""What _HEADS reads."""


def _read_mlps(file: Described) -> Fields:
    channels = file.counts("feed_forward_length")
    if {*channels} - {channels[0], 2 * channels[0]}:
        what = f"{file.architecture}.feed_forward_length is {shown(channels)}, neither one size nor twice that"
        raise UnknownArchitecture(what, do="Start from the release.")
    return {"ffn_hidden_size": channels[0], "use_double_wide_mlp": channels[-1] != channels[0]}


def _write_mlps(model: ModelShape) -> keys.Said:
    size, wide = model.ffn_hidden_size, model.num_layers - model.num_kv_shared_layers
    if not model.use_double_wide_mlp:
        return {"feed_forward_length": size}
    return {"feed_forward_length": [size if layer < wide else 2 * size for layer in range(model.num_layers)]}


_MLPS = keys.GgufEntry(("ffn_hidden_size", "use_double_wide_mlp"), ("feed_forward_length",), _read_mlps, _write_mlps)


_LAYERS = (
    keys.integer("num_kv_shared_layers", "attention.shared_kv_layers", 0),
    keys.integer_or_none("per_layer_embed_dim", "embedding_length_per_layer_input", NEEDED),
    keys.WINDOWS,
)
_UNUSED = keys.GgufEntry(
    ("stores_unused",),
    (),
    lambda file: {
        "stores_unused": bool(file.count("attention.shared_kv_layers", 0))
        and file.has(f"blk.{file.layers() - 1}.attn_k.weight")
    },
)


def _family(*counts: keys.GgufEntry, size: tuple[keys.GgufEntry, ...] = (), **experts: object) -> GgufFamily:
    """Without `experts`, or with the keys of their number and size, and what llama.cpp computes of them."""
    return GgufFamily(
        "gemma4",
        rows=_ROWS,
        keys=base_keys(
            *counts,
            heads=keys.integer("num_attention_heads", "attention.head_count"),
            rope=(_HEADS, rope_keys.ROPE, rope_keys.LOCAL_BASE),
            mlp=(_MLPS,),
            head_size=_HEAD_SIZE,
        ),
        more=(FINAL_CAP, keys.WINDOW, *_LAYERS, _LOCAL_SIZE, *size, _TURNED, _UNUSED),
        reads=() if experts else (keys.NO_EXPERTS,),
        computed={
            **COMPUTED,
            **dict.fromkeys(("post_layernorms", "qk_layernorm", "v_l2_norm", "layer_scalar"), True),
            "query_pre_attn_scalar": 1.0,
            **experts,
        },
        scalings={"proportional": ("partial_rotary_factor",)},
        sentencepiece="gemma4",
        scaled=rows.SCALED,
    )


_SPARSE = _family(
    *expert_keys.EXPERT_COUNTS,
    size=(expert_keys.EXPERT_SIZE,),
    **expert_keys.IN_ALL_LAYERS,
    **{"moe.own_norms": True, "moe.shared_ffn_hidden_size": keys.SameAs("ffn_hidden_size")},
)

FAMILIES = {"gemma4_text": replace(_family(), with_experts=_SPARSE)}
