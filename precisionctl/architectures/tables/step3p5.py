"""Step 3.5 (StepFun), and the text model of Step 3.7: attention with a gate of each head, a window in three layers of
four, and DeepSeek-V3's experts without groups. Names and rows in Megatron are Megatron-Bridge's
(models/stepfun/step35_bridge.py), with the gates of Megatron-LM's dev branch.

Traps: layers with a window have more heads, and turn another share of them by another base, without scaling. What is
behind an activation is clamped in some layers, and otherwise in routed experts than in other MLPs; Megatron-Core clamps
before it. Norms store their factor less one. Lists by layer go on with those of prediction layers, which have a window,
a dense MLP, and output layers of their own: Megatron has no place for these, and Bridge takes the model's.

Published config.json files say all this in other words than transformers' class, which reads both and writes its own;
engines go by either, and mlx-lm by the published ones alone, which are written here. transformers has this model within
Step 3.7 alone. Published files have experts in three tensors for a layer, its class in memory in two, and engines find
codes of each expert by itself.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import (
    WINDOWS,
    by_kind,
    layers_in_window,
    listed_layers,
    nowhere,
    numbered_layers,
    sizes_by_layer,
    window_fields,
)
from precisionctl.architectures.head_rearrangements import QKV_GATES
from precisionctl.architectures.param_map import Architecture, Either, Row, only_in, only_with, renamed
from precisionctl.architectures.rearrangements import VOCABULARY
from precisionctl.architectures.rope import rope_of_kinds, write_rope_of_kinds
from precisionctl.architectures.shared import deepseek_keys, llama_rows as llama, moe_rows as moe
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_parts import part_of_head, real
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import GATED_QKV_PARTS, ROWS, Parallel
from precisionctl.sizes import counted

_ABSENT = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e4}
"""What its class takes for keys that are not there."""

_GATE = "model.layers.{layer}.self_attn.g_proj.weight"
_QKV = (
    replace(
        llama.QKV_LINEAR[0],
        names=(*llama.QKV_LINEAR[0].hf, _GATE),
        rearrangement=QKV_GATES,
        parallel=Parallel("rows", names=GATED_QKV_PARTS),
        parts="qkv_parts",
        values=(_GATE,),
    ),
)
_OF_HEADS = (*_QKV, *llama.PROJ[:1])
_ATTENTION = (
    *llama.ATTENTION_NORM,
    *only_in("windowed", _OF_HEADS),
    *only_in("global", _OF_HEADS),
    *llama.QK_NORMS,
)

_BESIDE = (*moe.WIDE_ROUTER, *moe.EXPERT_BIAS, *moe.SHARED_EXPERTS)
_PUBLISHED = {
    "mlp.gate.e_score_correction_bias": "moe.router_bias",
    "mlp.gate.": "moe.gate.",
    "mlp.shared_experts.": "share_expert.",
}
_NUMBERED = renamed(moe.NUMBERED, {".mlp.": ".moe."})
_EXPERTS = Either(
    tuple(
        replace(row, names=tuple(f"{name.replace('.experts.{expert}.', '.')}[{{expert}}]" for name in row.hf))
        for row in _NUMBERED
    ),
    for_engines=_NUMBERED,
    in_memory=moe.FUSED,
)

_AHEAD = "model.layers.{mtp_layer}."
_HEADS_AHEAD = only_with(
    "mtp_output_layers",
    (
        Row(
            f"{_AHEAD}transformer.shared_head.output.weight",
            "mtp.layers.{mtp}.output_layer.weight",
            ("padded_vocab_size", "hidden_size"),
            VOCABULARY,
            ROWS,
        ),
    ),
)
_PREDICTION = llama.prediction_layer(
    (f"{_AHEAD}{name}" for name in ("enorm", "hnorm", "eh_proj", "transformer.shared_head.norm")),
    renamed(
        (*llama.ATTENTION_NORM, *_OF_HEADS, *llama.QK_NORMS, *llama.MLP_NORM, *llama.MLP),
        {"model.layers.{layer}.": _AHEAD},
        llama.PREDICTION_LAYER,
    ),
)

_KINDS = {in_window: kind for kind, in_window in WINDOWS.items()}


def _ahead(config: keys.Config) -> int:
    """How many prediction layers there are."""
    return keys.count(config, "num_nextn_predict_layers")


def _of_decoder(config: keys.Config, key: str) -> list[Any] | None:
    """What a key lists of the decoder's layers; None where it says nothing."""
    if config.get(key) is None:
        return None
    number = keys.layers(config)
    return keys.as_list(config[key], key, counted(number, "layer"), (number, number + _ahead(config)))[:number]


def _of_prediction(config: keys.Config, of_all: str, own: str) -> list[Any]:
    """What is listed of prediction layers: behind the decoder's layers, or under a key of their own."""
    behind = config.get(of_all) or []
    return [*behind[keys.layers(config) :], *keys.as_list(config.get(own) or [], own, "layers")]


def _of_kind(config: keys.Config, key: str, windows: Sequence[bool], in_window: bool) -> Any:
    """What a key says of the layers with a window, or of those without one: for all of them, or in a list by layer."""
    value = config.get(key)
    if not isinstance(value, list):
        return value
    by_layer = zip(_of_decoder(config, key) or (), windows, strict=True)
    of_kind = [each for each, there in by_layer if there == in_window]
    if any(each != of_kind[0] for each in of_kind):
        raise UnknownArchitecture(f"{key}={shown(value)}", do="Known is one value for each kind of layer.")
    return of_kind[0] if of_kind else None


def _by_kinds(config: keys.Config, windows: Sequence[bool]) -> dict[str, Any]:
    """Rotary parameters by kind of layer, of published words."""
    found: dict[str, Any] = {}
    for in_window in sorted({*windows}):
        share = _of_kind(config, "partial_rotary_factors", windows, in_window)
        theta = _of_kind({**_ABSENT, **config}, "rope_theta", windows, in_window)
        of_kind = found[_KINDS[in_window]] = {"rope_type": "default", "rope_theta": theta}
        if share is not None:
            of_kind["partial_rotary_factor"] = part_of_head(share, "partial_rotary_factors")
    scaling = keys.section(config, "rope_scaling")
    if scaling and _KINDS[False] in found:
        scaled = config.get("yarn_only_types")
        if scaled not in (None, [_KINDS[False]]) and any(windows):
            raise UnknownArchitecture(f"yarn_only_types={shown(scaled)}", do="Known is scaling without windows alone.")
        found[_KINDS[False]] |= scaling
    return found


def _read_rope(config: keys.Config, windows: Sequence[bool]) -> keys.Fields:
    """Parameters by kind of layer, or published words where there are none of each. Raises DamagedCheckpoint where both
    are there and differ."""

    def fields(kinds: Mapping[str, Any]) -> keys.Fields:
        if any(windows) and kinds[_KINDS[True]].get("rope_type", "default") != "default":
            raise UnknownArchitecture("rotary scaling in layers with a window")
        sized = {key: value for key, value in config.items() if key == "max_position_embeddings"}
        return rope_of_kinds({**sized, "rope_parameters": kinds}, windows, {}, 1.0)

    said, used = keys.section(config, "rope_parameters"), [_KINDS[kind] for kind in {*windows}]
    if not all(isinstance(said.get(kind), Mapping) for kind in used):
        return fields(_by_kinds(config, windows))
    found = fields(said)
    if any(config.get(key) is not None for key in ("rope_theta", "partial_rotary_factors", "rope_scaling")):
        if fields(_by_kinds(config, windows)) != found:
            what = "`rope_parameters` and what is said by layer (`rope_theta`, `partial_rotary_factors`) differ"
            raise DamagedCheckpoint(what, do="Keep what is meant: transformers goes by `rope_parameters`.")
    return found


def _read_heads(config: keys.Config, windows: Sequence[bool]) -> keys.Fields:
    said = {**_ABSENT, **config}
    heads, groups, head = (keys.size(said, key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    other = keys.section(config, "attention_other_setting")
    alike = {"attention_type": _KINDS[True], "num_attention_groups": groups, "head_dim": head}
    if any(other.get(key) not in (None, value) for key, value in alike.items()):
        do = "Known are layers with a window that have another number of heads, and nothing else otherwise."
        raise UnknownArchitecture(f"attention_other_setting={shown(other)}", do=do)
    in_window = keys.size({"num_attention_heads": heads, **other}, "num_attention_heads")
    key = "num_sliding_attention_heads"
    if config.get(key) is not None:
        if other and keys.size(config, key) != in_window:
            raise DamagedCheckpoint(f"{key} is {shown(config[key])} beside {in_window} in attention_other_setting")
        in_window = keys.size(config, key)
    usual, otherwise = ({"num_attention_heads": number} for number in (heads, in_window))
    by_layer = {str(layer): otherwise for layer, there in enumerate(windows) if there and otherwise != usual}
    own = {layer: each for layer, each in sizes_by_layer(config).items() if each != usual}
    if config.get("per_layer_config") is not None and own != by_layer:
        do = "Known is another number of heads in layers with a window."
        raise UnknownArchitecture(f"per_layer_config={shown(config['per_layer_config'])}", do=do)
    return {
        "num_query_groups": groups,
        "kv_channels": head,
        **by_kind(windows, {"num_attention_heads": in_window}, {"num_attention_heads": heads}),
    }


def _read_attention(config: keys.Config) -> keys.Fields:
    windows = layers_in_window({**config, "layer_types": _of_decoder(config, "layer_types")}, nowhere)
    ahead = _of_prediction(config, "layer_types", "mtp_layer_types")
    if any(kind != _KINDS[any(windows)] for kind in ahead):  # they have the window, too, if any layer has
        do = f"Known are prediction layers of {_KINDS[any(windows)]}."
        raise UnknownArchitecture(f"mtp_layer_types={shown(ahead)}", do=do)
    if config.get("query_pre_attn_scalar") not in (None, {**_ABSENT, **config}["head_dim"]):
        do = "Known is the size of a head."
        raise UnknownArchitecture(f"query_pre_attn_scalar={shown(config['query_pre_attn_scalar'])}", do=do)
    turning = config.get("use_rope_layers") or []
    if not isinstance(turning, list) or not all(turning):
        raise UnknownArchitecture(f"use_rope_layers={shown(turning)}", do="Known are positions in all layers.")
    return {**_read_heads(config, windows), **_read_rope(config, windows), **window_fields(config, windows)}


def _write_attention(model: ModelShape) -> keys.Config:
    windows = model.windows
    of_all = windows + [any(windows)] * model.mtp_num_layers
    rope = write_rope_of_kinds(model)["rope_parameters"]
    listed = ("rope_theta", "partial_rotary_factor")
    scaling = {key: value for key, value in rope[_KINDS[False]].items() if key not in listed}
    in_window = {
        "attention_type": _KINDS[True],
        "num_attention_heads": model.num_attention_heads,
        "num_attention_groups": model.num_query_groups,
        "head_dim": model.kv_channels,
    }
    return {
        "num_attention_heads": model.attention_of(in_window=False).num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "attention_other_setting": in_window if any(windows) else None,
        "sliding_window": model.sliding_window,
        "layer_types": [_KINDS[each] for each in of_all],
        "rope_theta": [rope[_KINDS[each]]["rope_theta"] for each in of_all],
        "partial_rotary_factors": [rope[_KINDS[each]]["partial_rotary_factor"] for each in of_all],
        "rope_scaling": scaling if scaling["rope_type"] != "default" else None,
        "yarn_only_types": [_KINDS[False]],
    }


def _read_mlps(config: keys.Config) -> keys.Fields:
    """Layers have experts as transformers lists them, else as published files do, else all but the first three do.
    Prediction layers have none."""
    number = keys.layers(config)
    types = _of_decoder(config, "mlp_layer_types")
    listed = listed_layers({**config, "mlp_layer_types": types}, deepseek_keys.MLPS, "mlp_layer_types")
    ahead = _of_prediction(config, "mlp_layer_types", "mtp_mlp_layer_types")
    numbers = config.get("moe_layers_enum")
    if numbers is None:
        experts = [layer >= 3 for layer in range(number)] if listed is None else listed
    else:
        texts = numbers.split(",") if isinstance(numbers, str) else []
        if texts and all(re.fullmatch(r"\s*[0-9]{0,9}\s*", text) for text in texts):
            numbers = [int(text) for text in texts if text.strip()]
        sparse = numbered_layers(numbers, "moe_layers_enum")
        experts = [layer in sparse for layer in range(number)]
        ahead += ["sparse" for layer in range(number, number + _ahead(config)) if layer in sparse]
        if listed not in (None, experts):
            raise DamagedCheckpoint("mlp_layer_types and moe_layers_enum say different layers")
    if any(kind != "dense" for kind in ahead):
        raise UnknownArchitecture(f"mtp_mlp_layer_types={shown(ahead)}", do="Known are dense prediction layers.")
    return {
        "moe.layer_freq": tuple(experts),
        "moe.swiglu_limits": _limits(config, "swiglu_limits", experts),
        "swiglu_limits": _limits(config, "swiglu_limits_shared", [True] * len(experts)),
    }


def _limits(config: keys.Config, key: str, heeded: Sequence[bool]) -> tuple[float, ...] | None:
    """What layers are clamped to, of those that heed it; None where none is."""
    listed = _of_decoder(config, key) or []
    found = [real(each, key) if each else 0.0 for each in listed]
    limits = tuple(each if there else 0.0 for each, there in zip(found, heeded, strict=False))
    return limits if any(limits) else None


def _write_mlps(model: ModelShape) -> keys.Config:
    moe_part = keys.part_of(model, "moe")
    none = [0.0] * (model.num_layers + model.mtp_num_layers)

    def limits(of_layers: Sequence[float] | None) -> list[float]:
        return [*of_layers, *none[model.num_layers :]] if of_layers else none

    return {
        "moe_layers_enum": ",".join(str(layer) for layer in range(model.num_layers) if model.has_experts(layer)),
        "swiglu_limits": limits(moe_part.swiglu_limits),
        "swiglu_limits_shared": limits(model.swiglu_limits),
    }


def _read_prediction(config: keys.Config) -> keys.Fields:
    ahead = _ahead(config)
    return {"mtp_num_layers": ahead, **dict.fromkeys(("mtp_dense", "mtp_output_layers"), bool(ahead))}


def _unwritten(*entries: keys.Rule) -> tuple[keys.Rule, ...]:
    """Keys of transformers' class that no published file has."""
    return tuple(keys.Rule(each.keys, each.read) for each in entries)


_WORDS = {
    "num_key_value_heads": "num_attention_groups",
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
}
"""Of transformers' class, and what published files have for them."""

ARCHITECTURE = Architecture(
    model_types={"step3p5": "Step3p5ForCausalLM"},
    rows=(
        *llama.model_rows(
            *_ATTENTION,
            *llama.MLP_NORM,
            *llama.MLP,
            *moe.MOE_NORM,
            Either(renamed(_BESIDE, _PUBLISHED), in_memory=_BESIDE),
            _EXPERTS,
        ),
        *_PREDICTION,
        *_HEADS_AHEAD,
    ),
    config=(
        *keys.SIZES,
        keys.SILU,
        *_unwritten(keys.only("attention_bias", False), keys.only("mlp_bias", False), keys.only("gating", True)),
        *keys.reworded(
            (
                keys.Rule(
                    (
                        *("num_attention_heads", "num_key_value_heads", "head_dim", "num_sliding_attention_heads"),
                        *("attention_other_setting", "per_layer_config", "sliding_window", "layer_types"),
                        *("mtp_layer_types", "rope_parameters", "rope_theta", "partial_rotary_factors"),
                        *("rope_scaling", "yarn_only_types", "use_rope_layers", "query_pre_attn_scalar"),
                    ),
                    _read_attention,
                    _write_attention,
                ),
                keys.Key("moe.num_experts", "n_routed_experts", 288),
                keys.Key("moe.topk", "num_experts_per_tok", 8),
            ),
            _WORDS,
            published=True,
        ),
        keys.only("use_qk_norm", True, "qk_layernorm", True),
        keys.only("zero_centered", True, "zero_centered_gamma", True),
        keys.always("hf_zero_centered_gamma", True),
        keys.only("use_head_wise_attn_gate", True, "head_wise_attn_gate", True),
        keys.only("att_impl_type", "GQA"),
        keys.only("use_moe", True),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size", 1280),
        keys.Key("moe.shared_ffn_hidden_size", "share_expert_dim", 1280, synonym="share_expert_dims"),
        keys.Rule(
            (
                *("mlp_layer_types", "moe_layers_enum", "mtp_mlp_layer_types"),
                *("swiglu_limits", "swiglu_limits_shared"),
            ),
            _read_mlps,
            _write_mlps,
        ),
        keys.only("moe_router_activation", "sigmoid", "moe.score_function", "sigmoid"),
        keys.only("use_moe_router_bias", True, "moe.expert_bias", True),
        keys.only("norm_expert_weight", True),
        keys.only("need_fp32_gate", True),
        keys.Key("moe.topk_scaling_factor", "moe_router_scaling_factor", 1.0),
        keys.Rule(
            ("num_nextn_predict_layers",),
            _read_prediction,
            lambda model: {"num_nextn_predict_layers": model.mtp_num_layers},
        ),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
        keys.Rule((), write=lambda model: {"pad_token_id": 1}),  # as its class has it, which takes no null
        keys.tied(False),
    ),
    names_by="Megatron-Bridge",
)
