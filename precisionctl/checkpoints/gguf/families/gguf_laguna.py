"""Laguna (Poolside), in whose layers with a window attention has other heads, and turns another share of them.

Sources: llama.cpp's src/models/laguna.cpp, and conversion/laguna.py.
"""

from precisionctl.architectures.config_keys import Fields
from precisionctl.architectures.config_layers import by_kind
from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.model.model_shape import ModelShape

_HEADS = "attention.head_count"


def _usual(layers: int) -> list[bool]:
    """The layers with a window where a file does not say which: all but the first of each four."""
    return [layer % 4 != 0 for layer in range(layers)]


def _read_attention(file: Described) -> Fields:
    layers, heads = file.decoder_layers(), file.counts(_HEADS, least=1)
    window = file.count("attention.sliding_window", 0) or None
    windows = (file.flags(keys.PATTERN) or _usual(layers)) if window else [False] * layers
    in_window, elsewhere = (
        keys.one_of(file, _HEADS, [number for number, has in zip(heads, windows, strict=True) if has is kind])
        for kind in (True, False)
    )
    size = keys.head_size(file)
    turned = file.count("rope.dimension_count", size)
    turned_in_window = file.count("rope.dimension_count_swa", turned)
    return {
        "num_query_groups": keys.one_of(file, keys.HEADS_KV, file.counts(keys.HEADS_KV, least=1)),
        "window_layers": tuple(windows) if any(windows) and not all(windows) else None,
        "sliding_window": window,
        **by_kind(
            windows,
            {"num_attention_heads": in_window, "rotary_percent": turned_in_window / size},
            {"num_attention_heads": elsewhere, "rotary_percent": turned / size},
        ),
    }


def _write_window(model: ModelShape) -> keys.Said:
    if model.sliding_window is None:
        return {}
    windows = model.windows
    pattern = {} if windows == _usual(model.num_layers) else {keys.PATTERN: windows}
    return {"attention.sliding_window": model.sliding_window, **pattern}


def _write_turned(model: ModelShape) -> keys.Said:
    turned = {"rope.dimension_count": model.attention_of(False).rotary_size}
    return turned | ({} if model.sliding_window is None else {"rope.dimension_count_swa": model.rotary_size})


_ATTENTION = keys.GgufEntry(
    (
        *("num_attention_heads", "num_query_groups", "sliding_window", "window_layers", "rotary_percent"),
        *("global_attention.num_attention_heads", "global_attention.rotary_percent"),
    ),
    (
        *(_HEADS, keys.HEADS_KV, "attention.sliding_window", keys.PATTERN),
        *("rope.dimension_count", "rope.dimension_count_swa"),
    ),
    _read_attention,
    lambda model: {
        _HEADS: [model.attention_of(window).num_attention_heads for window in model.windows],
        keys.HEADS_KV: model.num_query_groups,
    },
)


def _read_local_base(file: Described) -> Fields:
    in_windows = bool(file.count("attention.sliding_window", 0))
    base = file.number("rope.freq_base_swa", None)
    return {"rotary_base_local": (base or file.number("rope.freq_base", 10000.0)) if in_windows else None}


def _write_local_base(model: ModelShape) -> keys.Said:
    if model.sliding_window is None:
        return {}
    if model.rotary_base_local is None and model.rope_scaling:
        raise keys.refused(model, "with scaled rotary embeddings in layers with a window")
    return {"rope.freq_base_swa": float(model.rotary_base_local or model.rotary_base)}


_LOCAL_BASE = keys.GgufEntry(("rotary_base_local",), ("rope.freq_base_swa",), _read_local_base, _write_local_base)


def _read_gate(file: Described) -> Fields:
    per_head = file.rows("blk.0.attn_gate.weight") == file.counts(_HEADS)[0]
    return {"linear_gate": f"softplus per {'head' if per_head else 'element'}"}


def _write_gate(model: ModelShape) -> keys.Said:
    if not (model.linear_gate or "").startswith("softplus"):
        raise keys.refused(model, f"with linear_gate {model.linear_gate}")
    return {}


FAMILIES = {
    "laguna": GgufFamily(
        "laguna",
        rows=[
            *rows.DECODER,
            *rows.in_layers({**rows.QK_NORMS, "self_attn.g_proj": "attn_gate"}),
            *rows.MLP,
            *rows.ROUTER,
            rows.GgufRow("model.layers.{layer}.mlp.experts.e_score_correction_bias", rows.CORRECTION),
            *rows.EXPERTS,
            *rows.SHARED_EXPERT,
        ],
        keys=base_keys(*expert_keys.EXPERT_COUNTS, heads=_ATTENTION, rope=(rope_keys.ROPE, _LOCAL_BASE)),
        more=(
            keys.VOCABULARY,
            keys.write_only(_write_window),
            expert_keys.EXPERT_SIZE,
            expert_keys.SHARED_EXPERT_SIZE,
            expert_keys.NORMALISED,
            expert_keys.WEIGHTS_SCALE,
            expert_keys.scored_by("sigmoid"),
            expert_keys.LEADING_DENSE,
            keys.write_only(_write_turned),
            keys.GgufEntry(("linear_gate",), (), _read_gate, _write_gate),
        ),
        computed={"qk_layernorm": True, "moe.expert_bias": True},
        down_last=True,
    ),
}
