"""Laguna (Poolside): windows with a number of heads of their own, softplus gates of what heads give, and DeepSeek-V3's
experts without groups.

Traps: the gate is one number for each head (XS.2, XS 2.1, S 2.1) or one for each channel (M.1), for which config.json
has `gating`; its scaling of rotary embeddings and the share of a head that turns differ by kind of layer; without a
list no layer has the window. Published files call the bias that chooses experts, and the shared ones, otherwise than
transformers' class in memory, and say dense layers twice (`mlp_only_layers`).
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import (
    by_kind,
    layers_in_window,
    nowhere,
    window_fields,
    write_window,
)
from precisionctl.architectures.param_map import Architecture, Either, only_in, renamed
from precisionctl.architectures.rope import KEYS, rope_of_kinds, write_rope_of_kinds
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.moe_keys import experts_by_number
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_fields import LinearGate
from precisionctl.model.model_parts import check_size
from precisionctl.model.model_shape import ModelShape
from precisionctl.sizes import counted

_ABSENT = {"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128}
"""What its class takes for keys that are not there."""

_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}

_OF_HEADS = (*llama.QKV_LINEAR, *llama.LINEAR_GATE, *llama.PROJ)
_ATTENTION = (*llama.SEPARATE_NORM, *only_in("windowed", _OF_HEADS), *only_in("global", _OF_HEADS), *llama.QK_NORMS)

_PUBLISHED = {
    "mlp.gate.e_score_correction_bias": "mlp.experts.e_score_correction_bias",
    "shared_experts": "shared_expert",
}
_BESIDE = (*moe.EXPERT_BIAS, *moe.SHARED_EXPERTS)
_ROUTING = (*moe.ROUTER, Either(renamed(_BESIDE, _PUBLISHED), in_memory=_BESIDE))

_EXPERTS, _BY_NUMBER = deepseek_keys.experts_by_list(dense=1), experts_by_number()


def _read_attention(config: keys.Config) -> keys.Fields:
    said = {**_ABSENT, **config}
    windows = layers_in_window(config, nowhere)
    in_window, without = _heads(config, windows)
    return {
        "num_query_groups": keys.size(said, "num_key_value_heads"),
        "kv_channels": keys.size(said, "head_dim"),
        **by_kind(windows, {"num_attention_heads": in_window}, {"num_attention_heads": without}),
        **rope_of_kinds(config, windows, _ROPE, 1.0),
        **window_fields(config, windows, 512),
    }


def _heads(config: keys.Config, windows: list[bool]) -> tuple[int, int]:
    """How many a layer with a window has, and one without."""
    key = "num_attention_heads_per_layer"
    listed, heads = config.get(key), keys.size({**_ABSENT, **config}, "num_attention_heads")
    if listed is None:
        return heads, heads
    for each in keys.as_list(listed, key, counted(len(windows), "layer"), (len(windows),)):
        check_size(each, key)
    kinds = [{each for each, there in zip(listed, windows, strict=True) if there == kind} for kind in (True, False)]
    if any(len(kind) > 1 for kind in kinds):
        do = "Known is one number of heads in layers with a window and one in the others."
        raise UnknownArchitecture(f"{key}={shown(listed)}", do=do)
    in_window, without = (next(iter(kind), listed[0]) for kind in kinds)
    return in_window, without


def _write_attention(model: ModelShape) -> keys.Config:
    without = model.attention_of(in_window=False)
    windows = model.windows
    return {
        "num_attention_heads": without.num_attention_heads,
        "num_attention_heads_per_layer": [model.attention_of(each).num_attention_heads for each in windows],
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        **write_window(model),
        **write_rope_of_kinds(model),
    }


_GATES: dict[bool | str, LinearGate] = {
    "per-head": "softplus per head",
    "per-element": "softplus per element",
    True: "softplus per head",
}


def _read_gate(config: keys.Config) -> keys.Fields:
    gating, types = config.get("gating", True), config.get("gating_types")
    if not isinstance(gating, bool | str) or gating not in _GATES:
        raise UnknownArchitecture(f"gating={shown(gating)}", do="Known: true, per-head, per-element.")
    kind = _GATES[gating]
    listed = kind.removeprefix("softplus ").replace(" ", "_")
    if types is not None and (not isinstance(types, list) or any(each != listed for each in types)):
        what = f"gating_types is {shown(types)}, and transformers, which passes over it, takes {listed} everywhere"
        raise DamagedCheckpoint(what)
    return {"linear_gate": kind}


def _read_layers(config: keys.Config) -> keys.Fields:
    fields = _EXPERTS.read(config)
    said = {key: config[key] for key in _BY_NUMBER.keys if config.get(key) is not None}
    if said and fields != _BY_NUMBER.read({"num_hidden_layers": config["num_hidden_layers"], **said}):
        what = f"{shown(said)} is said, and transformers takes other layers for dense ones"
        raise DamagedCheckpoint(what, do="Say in mlp_layer_types which layers are `dense` and `sparse`.")
    return fields


ARCHITECTURE = Architecture(
    model_types={"laguna": "LagunaForCausalLM"},
    behind={"gate": "experts"},
    rows=deepseek_rows.decoder(_ATTENTION, routing=_ROUTING),
    config=(
        *keys.SIZES,
        keys.ATTENTION_BIAS,
        keys.SILU,
        keys.Rule(
            (
                *("num_attention_heads", "num_attention_heads_per_layer", "num_key_value_heads", "head_dim"),
                *("sliding_window", "layer_types", *KEYS),
            ),
            _read_attention,
            _write_attention,
        ),
        keys.always("qk_layernorm", True),
        keys.Rule(
            ("gating", "gating_types"),
            _read_gate,
            lambda model: {"gating": next((word for word, kind in _GATES.items() if kind == model.linear_gate), None)},
        ),
        keys.Key("moe.num_experts", "num_experts"),
        keys.Key("moe.topk", "num_experts_per_tok", 8),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size"),
        keys.Key("moe.shared_ffn_hidden_size", "shared_expert_intermediate_size", 512),
        keys.Rule(
            (*_EXPERTS.keys, *_BY_NUMBER.keys),
            _read_layers,
            lambda model: {**_EXPERTS.write(model), **_BY_NUMBER.write(model)},
        ),
        keys.always("moe.score_function", "sigmoid"),
        keys.always("moe.expert_bias", True),
        keys.only("norm_topk_prob", True),
        keys.only("moe_router_logit_softcapping", 0.0),
        keys.only("moe_apply_router_weight_on_input", False),
        keys.Key("moe.topk_scaling_factor", "moe_routed_scaling_factor", 1.0),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        keys.tied(False),
    ),
    names_by="this project",
)
