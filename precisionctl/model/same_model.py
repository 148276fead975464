"""Do two ModelShapes describe the same model?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from precisionctl.model.model_shape import ModelShape
from precisionctl.model.untabled_model import UntabledModel

STORED = (
    *("architecture", "wrapper", "vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by"),
    *("zero_centered_gamma", "hf_zero_centered_gamma", "add_bias_linear", "add_qkv_bias"),
    *("unread_positions", "ple.split_parts"),
)
"""Fields that say how a model is named, padded and stored, in one layout or the other, and not what it computes."""

TENSORS = (
    *("qkv_bias", "proj_bias", "mlp_bias", "output_bias", "norm_bias", "norm_weight", "mtp_num_layers", "mtp_dense"),
    *("mtp_output_layers", "stores_unused", "hf_expert_bias"),
)
"""Fields for tensors that not every model has. Biases of zeros and norms that multiply by 1, which one layout may have
and the other not, change no function, and no logits come from prediction layers."""

USED = "used"
"""The value of a part, such as experts, of which some layer makes use."""


def differences(model: ModelShape, other: ModelShape) -> dict[str, tuple[object, object]]:
    """Why the two are not the same model: each field by which they make another function of the same tensors, with the
    model's value and the other's. Fields of a part, such as experts, have a dot in their names.

    A field that no layer of a model uses is None there, which differs from a value that the other uses. A field that
    only says how another is meant is compared where both models have that other (`_MEANT_BY`). STORED and TENSORS are
    no differences: whoever reads tensors sees them. So what prediction layers alone use (attention, beside layers of
    delta nets) is none where only one of the two has such layers. With an UntabledModel there is none: its config.json
    is compared key by key.
    """
    if any(isinstance(each, UntabledModel) for each in (model, other)):
        return {}
    if not (model.mtp_num_layers and other.mtp_num_layers):
        model, other = (replace(each, mtp_num_layers=0) for each in (model, other))
    mine, others = used(model), used(other)
    return {name: (mine[name], others[name]) for name in mine if mine[name] != others.get(name, mine[name])}


def in_words(setting: object) -> str:
    """A field's value in `differences`, for people."""
    return "not used" if setting is None else str(setting)


def used(model: ModelShape) -> dict[str, object]:
    """The fields that the computation depends on, those of parts too: None where no layer uses one, and without those
    of `_MEANT_BY` whose other field is not on."""
    found = {name: value for name, value in vars(model).items() if name not in (*STORED, *TENSORS)}
    for name in (*_OF_LAYERS, *_OF_MODELS):
        part = getattr(model, name) if name not in _OF_LAYERS or _in_any(model, _OF_LAYERS[name]) else None
        fields = {f"{name}.{field}": value for field, value in vars(part).items()} if part else {}
        found |= {name: USED if part else None}
        found |= {field: value for field, value in fields.items() if field not in STORED}
    own = None if _in_all(model, ModelShape.in_window) else model.global_attention
    found["global_attention"] = USED if own else None
    if own:
        found |= {f"global_attention.{name}": getattr(model.attention_of(False), name) for name in vars(own)}
        found |= dict.fromkeys(() if _in_any(model, ModelShape.in_window) else own.said)
    found["rope_scaling"] = _used_scaling(model.rope_scaling)
    if model.learned_positions:
        found["max_position_embeddings"] = model.position_rows  # Megatron counts them together
    everywhere = found.pop("qk_l2_norm_everywhere") or all(model.rope_layers or ())
    if model.qk_l2_norm:
        found["qk_l2_norm"] = "in all layers" if everywhere else "in layers with rotary embeddings"
    for unused, where in _UNUSED:
        if where(model):
            found |= dict.fromkeys(name for name in unused if name in found)
    return {name: value for name, value in found.items() if name not in _MEANT_BY or _MEANT_BY[name](model)}


def _in_any(model: ModelShape, has: Callable[[ModelShape, int], bool]) -> bool:
    return any(has(model, layer) for layer in range(model.num_layers))


def _in_all(model: ModelShape, has: Callable[[ModelShape, int], bool]) -> bool:
    return all(has(model, layer) for layer in range(model.num_layers))


def _attends(model: ModelShape) -> bool:
    return model.mtp_num_layers > 0 or _in_any(model, ModelShape.has_attention)


def _rotates(model: ModelShape) -> bool:
    return _attends(model) and model.position_embedding == "rope" and any(model.rope_layers or (True,))


def _heeds_most_positions(model: ModelShape) -> bool:
    scaling = _used_scaling(model.rope_scaling) if _rotates(model) else None
    return model.learned_positions or (scaling or {}).get("rope_type") in ("dynamic", "longrope")


_MEANT_BY: Mapping[str, Callable[[ModelShape], bool]] = {
    "rounded_embedding_multiplier": lambda model: model.embedding_multiplier != 1,
    "rounded_per_layer_multipliers": lambda model: model.per_layer_embed_dim is not None,
    "final_gamma_whole": lambda model: model.zero_centered_gamma,
    "scaled_post_layernorms": lambda model: model.post_layernorms,
    "moe.expert_bias_on_logits": lambda model: model.has("moe.expert_bias"),
    "moe.expert_norms": lambda model: model.has("moe.latent_size"),
}
"""Fields that only say how another field is meant, and whether a model has that. They are left out of one that has not,
as None would be a second difference beside the other field's, or the only one where that is of how a model is stored
(`zero_centered_gamma`)."""

_OF_LAYERS: Mapping[str, Callable[[ModelShape, int], bool]] = {
    "moe": ModelShape.has_experts,
    "gdn": ModelShape.has_delta_net,
    "short_conv": ModelShape.has_short_conv,
}
"""Parts that only these layers use, of which a model may have none."""

_OF_MODELS = ("mla", "dsa", "msa", "csa", "mhc", "altup", "ple", "mamba", "heterogeneous", "multipliers")
"""Those that all of a model uses."""

_UNUSED: Sequence[tuple[tuple[str, ...], Callable[[ModelShape], bool]]] = (
    (("ffn_hidden_size",), lambda model: not _in_any(model, ModelShape.has_dense_mlp)),
    (
        ("activation", "gated_linear_unit", "activation_clamp", "glu_offset", "swiglu_limits"),
        lambda model: not (_in_any(model, ModelShape.has_dense_mlp) or _in_any(model, ModelShape.has_experts)),
    ),
    (
        ("activation_clamp", "glu_offset", "swiglu_limits", "moe.swiglu_limits"),
        lambda model: not model.gated_linear_unit,
    ),
    (("swiglu_limits",), lambda model: not any(model.swiglu_limits or ())),
    (("activation_sparsity",), lambda model: not (model.gated_linear_unit and any(model.activation_sparsity or ()))),
    (
        ("per_layer_vocab_size",),
        lambda model: model.per_layer_embed_dim is None or model.per_layer_tokens == model.vocab_size,
    ),
    (("moe.swiglu_limits",), lambda model: model.moe is None or not any(model.moe.swiglu_limits or ())),
    (
        ("use_double_wide_mlp",),
        lambda model: (
            not (model.use_double_wide_mlp and model.num_kv_shared_layers)
            or (model.moe is not None and all(model.moe.layer_freq))
        ),
    ),
    (("num_attention_heads", "num_query_groups", "kv_channels", "rope_layers"), lambda model: not _attends(model)),
    (("num_query_groups", "kv_channels", "v_head_dim"), lambda model: model.mla is not None),
    (("mla.nope_keys_by_head",), lambda model: _in_all(model, ModelShape.has_rope)),
    (("mla.kv_source_layers",), lambda model: not _in_any(model, ModelShape.shares_kv)),
    (
        ("query_pre_attn_scalar",),
        lambda model: (
            model.mla is None and model.query_pre_attn_scalar == model.kv_channels and not model.global_attention
        ),
    ),
    (("v_head_dim",), lambda model: model.v_head_dim == model.kv_channels),
    (("qk_layernorm_over_heads", "qk_layernorm_after_rope"), lambda model: not model.qk_layernorm),
    (
        ("post_norm_epsilon",),
        lambda model: (
            not (model.post_layernorms or (model.moe and model.moe.expert_norms))
            or model.post_norm_epsilon == model.norm_epsilon
        ),
    ),
    (("query_scaling_floor",), lambda model: model.query_scaling_beta is None),
    (
        ("sliding_window", "attention_chunk_size", "window_layers", "rotary_base_local"),
        lambda model: not _in_any(model, ModelShape.in_window),
    ),
    (("window_layers",), lambda model: _in_all(model, ModelShape.in_window)),
    (
        ("rotary_base", "rotary_base_local", "rotary_percent", "rotary_interleaved", "rope_scaling", "lerope"),
        lambda model: not _rotates(model),
    ),
    (("rope_layers",), lambda model: model.position_embedding != "rope" or all(model.rope_layers or ())),
    (("max_position_embeddings",), lambda model: not _heeds_most_positions(model)),
    (("shared_layernorm",), lambda model: not (model.pre_layernorms and model.parallel_residual)),
    (("mhc.epsilon",), lambda model: model.has("mhc.lowrank")),
    (
        ("moe.num_groups", "moe.group_topk", "moe.group_scores"),  # where all groups, or those of none, are chosen from
        lambda model: (
            model.moe is None
            or None in (model.moe.num_groups, model.moe.group_topk)
            or model.moe.num_groups == model.moe.group_topk
        ),
    ),
    (
        ("moe.pre_softmax",),
        lambda model: model.moe is not None and model.moe.probs_on_input and model.moe.score_function != "softmax",
    ),
    (("moe.shared_expert_gate", "moe.shared_average"), lambda model: not model.shared_experts),
    (("gdn.output_gate",), lambda model: model.has("gdn.kda")),
    (("gdn.kda_lora_rank", "gdn.kda_lower_bound", "gdn.kda_full_gate"), lambda model: not model.has("gdn.kda")),
)
"""Fields, and a test of the models in which they change nothing: no layer uses them, or the result is the same with any
value."""


def _used_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Rotary scaling without what is said and changes nothing."""
    used = {name: value for name, value in (scaling or {}).items() if value is not None}
    kind = used.get("rope_type", "default")
    plain = used.get("factor") == 1 and "attention_factor" not in used and kind in ("linear", "llama3", "yarn")
    if kind == "default" or plain:
        return None
    if kind == "yarn":
        used = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True} | used
        if not used.get("mscale_all_dim"):  # transformers heeds `mscale` beside it alone
            used = {name: value for name, value in used.items() if not name.startswith("mscale")}
    return used
