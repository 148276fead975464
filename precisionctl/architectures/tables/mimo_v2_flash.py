"""MiMo-V2-Flash: DeepSeek-V3's experts without groups and shared ones, behind attention with a window in five layers of
six. Names in Megatron are Megatron-Bridge's (models/mimo_v2_flash/mimo_v2_flash_bridge.py).

Traps: heads of values have fewer channels than those of keys, and are multiplied by `attention_value_scale`. Layers
with a window have twice the key-value heads, a rotary base of their own and sinks, which published files call
`attention_sink_bias`. Published config.json files say all this in other words (`hybrid_layer_pattern`, `swa_*`), by
which engines go and transformers does not. Their `sliding_window_size` does not count the token itself, for
transformers as for SGLang. Three prediction layers, `model.mtp.*`, of which config.json says nothing and which
transformers leaves out, have a window and dense MLPs.
"""

from functools import partial

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import by_kind, layer_types, layers_in_window
from precisionctl.architectures.param_map import Architecture, Either, Row, only_in, renamed
from precisionctl.architectures.rope import KEYS, rope_of_kinds, write_rope_of_kinds
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama, moe_rows as moe
from precisionctl.architectures.tables.gpt_oss import SINKS
from precisionctl.model.model_parts import check_count, real
from precisionctl.model.model_shape import ModelShape

_ABSENT = {"num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "sliding_window": 129, "rms_norm_eps": 1e-5}
"""What its class takes for keys that are not there."""

_SHARE = 0.334
"""Of a head, which turns."""

_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": _SHARE},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": _SHARE},
}

_SINKS = Either(renamed(SINKS, {"sinks": "attention_sink_bias"}), in_memory=SINKS)
_ATTENTION: tuple[Row | Either, ...] = (
    *llama.ATTENTION_NORM,
    *only_in("windowed", llama.QKV_LINEAR),
    *only_in("global", llama.QKV_LINEAR),
    _SINKS.changed(partial(only_in, "windowed")),
    *llama.PROJ,
)

_MTP = {"model.layers.{layer}.": "model.mtp.layers.{mtp}.", "post_attention_layernorm": "pre_mlp_layernorm"}
_PREDICTION = llama.prediction_layer(
    (f"model.mtp.layers.{{mtp}}.{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")),
    renamed(
        (*llama.ATTENTION_NORM, *llama.QKV_LINEAR, *_SINKS.first, *llama.PROJ, *llama.MLP_NORM, *llama.MLP),
        _MTP,
        llama.PREDICTION_LAYER,
    ),
)

_EXPERTS = deepseek_keys.experts_by_list(dense=1)
_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")


def _local(config: keys.Config, layers: int) -> list[bool]:
    return [layer > 0 and (layer + 1) % 6 != 0 for layer in range(layers)]


def _read_attention(config: keys.Config) -> keys.Fields:
    said = {**_ABSENT, **config}
    windows = layers_in_window(config, _local)
    heads, in_global, head, value = (keys.size(said, key) for key in _HEADS)
    window = {"num_query_groups": 2 * in_global, "softmax_offset": True}
    fields = {
        "num_attention_heads": heads,
        "kv_channels": head,
        "v_head_dim": value,
        "norm_epsilon": real(said["rms_norm_eps"], "rms_norm_eps"),
        **by_kind(windows, window, {"num_query_groups": in_global, "softmax_offset": False}),
        **rope_of_kinds(config, windows, _ROPE, _SHARE),
        **_EXPERTS.read(config),
        **(_read_window(said) if any(windows) else {}),
        "window_layers": tuple(windows) if any(windows) and not all(windows) else None,
    }
    keys.check_passed_over(config, _in_published_words(windows, in_global, fields))
    return fields


def _read_window(said: keys.Config) -> keys.Fields:
    if said.get("sliding_window_size") is None:
        return {"sliding_window": keys.size(said, "sliding_window")}
    check_count(said["sliding_window_size"], "sliding_window_size", 1 << 29)
    return {"sliding_window": said["sliding_window_size"] + 1}


def _in_published_words(windows: list[bool], in_global: int, fields: keys.Fields) -> keys.Config:
    """What published files say in other words."""
    base, local = fields["rotary_base"], fields["rotary_base_local"]
    return {
        "hybrid_layer_pattern": [int(window) for window in windows],
        "moe_layer_freq": [int(experts) for experts in fields["moe.layer_freq"]],
        "layernorm_epsilon": fields["norm_epsilon"],
        "swa_num_attention_heads": fields["num_attention_heads"],
        "swa_num_key_value_heads": 2 * in_global,
        "swa_head_dim": fields["kv_channels"],
        "swa_v_head_dim": fields["v_head_dim"],
        "rope_theta": base,
        "swa_rope_theta": base if local is None else local,
        "partial_rotary_factor": fields["rotary_percent"],
    }


def _write_attention(model: ModelShape) -> keys.Config:
    windows = model.windows
    without = model.attention_of(in_window=False)
    in_global = model.num_query_groups // 2 if all(windows) else without.num_query_groups
    fields = vars(model) | {"v_head_dim": model.value_channels, "moe.layer_freq": keys.part_of(model, "moe").layer_freq}
    window = model.sliding_window
    seen = {} if window is None else {"sliding_window": window, "sliding_window_size": window - 1}
    return {
        **_in_published_words(windows, in_global, fields),
        **dict(
            zip(_HEADS, (model.num_attention_heads, in_global, model.kv_channels, model.value_channels), strict=True)
        ),
        "rms_norm_eps": model.norm_epsilon,
        "layer_types": layer_types(model),
        **seen,
        **write_rope_of_kinds(model),
        **_EXPERTS.write(model),
    }


def _read_prediction(config: keys.Config) -> keys.Fields:
    number = config.get("num_nextn_predict_layers", 3)
    check_count(number, "num_nextn_predict_layers", 64)
    return {"mtp_num_layers": number, "mtp_dense": bool(number)}


_PUBLISHED = (
    *("hybrid_layer_pattern", "moe_layer_freq", "layernorm_epsilon", "swa_num_attention_heads", "swa_rope_theta"),
    *("swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim", "partial_rotary_factor"),
)
_READ = (*_HEADS, *_EXPERTS.keys, *KEYS, "rms_norm_eps", "layer_types", "sliding_window", "sliding_window_size")

ARCHITECTURE = Architecture(
    model_types={"mimo_v2_flash": "MiMoV2FlashForCausalLM"},
    behind={"gate": "experts"},
    rows=(*deepseek_rows.decoder(_ATTENTION, routing=(*moe.WIDE_ROUTER, *moe.EXPERT_BIAS)), *_PREDICTION),
    config=(
        *keys.SIZES,
        keys.SILU,
        keys.Rule((*_READ, *_PUBLISHED), _read_attention, _write_attention),
        keys.Key("attention_value_scale", "attention_value_scale", 1.0, absent=0.707),
        keys.Key("qkv_bias", "attention_bias", False),
        keys.only("add_swa_attention_sink_bias", True),
        keys.only("add_full_attention_sink_bias", False),
        keys.Key("moe.num_experts", "n_routed_experts", synonym="num_local_experts"),
        keys.Key("moe.topk", "num_experts_per_tok", 8),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size"),
        keys.only("n_shared_experts", None),
        *deepseek_keys.router(1, 1),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.0),
        keys.Rule(
            ("num_nextn_predict_layers",),
            _read_prediction,
            lambda model: {"num_nextn_predict_layers": model.mtp_num_layers},
        ),
        keys.tied(False),
    ),
    names_by="Megatron-Bridge",
)
