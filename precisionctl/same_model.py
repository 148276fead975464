"""Do two ModelShapes describe the same model?"""

from collections.abc import Mapping
from typing import Any

from precisionctl.model_shape import ModelShape
from precisionctl.untabled_model import UntabledModel

STORED = (
    *("architecture", "wrapper", "vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by"),
    *("zero_centered_gamma", "hf_zero_centered_gamma", "add_bias_linear", "add_qkv_bias"),
    *("unread_positions", "ple.split_parts"),
)
"""Fields that say how a model is named, padded and stored, in one layout or the other, and not what it computes."""

TENSORS = (
    *("qkv_bias", "proj_bias", "mlp_bias", "output_bias", "norm_bias", "norm_weight", "mtp_num_layers", "mtp_dense"),
    *("stores_unused", "hf_expert_bias"),
)
"""Fields for tensors that not every model has. Biases of zeros and norms that multiply by 1, which one layout may have
and the other not, change no function, and no logits come from prediction layers."""

USED = "used"
"""The value of a part, such as experts, of which some layer makes use."""


def differences(model: ModelShape, other: ModelShape) -> dict[str, tuple[object, object]]:
    """Why the two are not the same model: each field by which they make another function of the same tensors, with the
    model's value and the other's. Fields of a part, such as experts, have a dot in their names.

    What no layer uses is None, and no difference. Nor are STORED and TENSORS, which whoever reads tensors sees. With an
    UntabledModel there is none: its config.json is compared key by key.
    """
    if any(isinstance(each, UntabledModel) for each in (model, other)):
        return {}
    mine, others = used(model), used(other)
    return {name: (mine[name], others[name]) for name in mine if mine[name] != others.get(name, mine[name])}


def in_words(setting: object) -> str:
    """A field's value in `differences`, for people."""
    return "not used" if setting is None else str(setting)


def used(model: ModelShape) -> dict[str, object]:
    """The fields that the computation depends on, those of parts too. A field that no layer uses is None."""
    found = {name: value for name, value in vars(model).items() if name not in (*STORED, *TENSORS)}
    for name in ("moe", "gdn", "short_conv"):
        fields = part.used() if (part := getattr(model, name)) else {}
        found |= {name: USED if fields else None, **fields}
    found["rope_scaling"] = _used_scaling(model.rope_scaling)
    layers = range(model.num_layers)
    if not any(map(model.has_dense_mlp, layers)):
        found["ffn_hidden_size"] = None
        of_mlps = ("activation", "gated_linear_unit", "activation_clamp", "glu_offset")
        found |= {} if found["moe"] else dict.fromkeys(of_mlps)
    attends = model.mtp_num_layers or any(map(model.has_attention, layers))
    if not attends:
        found |= dict.fromkeys(("num_attention_heads", "num_query_groups", "kv_channels", "rope_layers"))
    for name in ("mla", "dsa", "msa", "csa", "mhc", "ple", "mamba", "multipliers"):
        if part := getattr(model, name):
            found |= {name: USED, **{f"{name}.{field}": value for field, value in vars(part).items()}}
    if model.mhc and model.mhc.lowrank:
        found["mhc.epsilon"] = None
    found.pop("ple.split_parts", None)
    if model.mla:
        found |= dict.fromkeys(("num_query_groups", "kv_channels", "v_head_dim"))
        if all(map(model.has_rope, layers)):
            found["mla.nope_keys_by_head"] = None
        if not any(map(model.shares_kv, layers)):
            found["mla.kv_source_layers"] = None
    elif model.query_pre_attn_scalar == model.kv_channels and not model.global_attention:
        found["query_pre_attn_scalar"] = None
    windows = tuple(map(model.in_window, layers))
    if model.v_head_dim == model.kv_channels:
        found["v_head_dim"] = None
    own = model.global_attention if not all(windows) else None
    found |= {"global_attention": USED if own else None}
    if own:
        found |= {f"global_attention.{name}": getattr(model.attention_of(False), name) for name in vars(own)}
        found |= dict.fromkeys(() if any(windows) else own.said)
    if not any(windows):
        found |= dict.fromkeys(("sliding_window", "attention_chunk_size", "window_layers", "rotary_base_local"))
    elif all(windows):
        found["window_layers"] = None
    if model.embedding_multiplier == 1:
        del found["rounded_embedding_multiplier"]  # and not None, so that a model that multiplies does not differ in it
    if not (model.pre_layernorms and model.parallel_residual):
        found["shared_layernorm"] = None
    if not model.num_kv_shared_layers or (model.moe and all(model.moe.layer_freq)):
        found["use_double_wide_mlp"] = None
    if model.query_scaling_beta is None:
        found["query_scaling_floor"] = None
    if not model.qk_layernorm:
        found |= dict.fromkeys(("qk_layernorm_over_heads", "qk_layernorm_after_rope"))
    if all(model.rope_layers or ()):
        found["rope_layers"] = None
    if not model.gated_linear_unit:
        found |= dict.fromkeys(("activation_clamp", "glu_offset"))
    if not attends or model.position_embedding != "rope" or not any(model.rope_layers or (True,)):
        rotary = ("rotary_base", "rotary_base_local", "rotary_percent", "rotary_interleaved", "rope_scaling", "lerope")
        found |= dict.fromkeys(rotary)
    if model.position_embedding != "rope":
        found["rope_layers"] = None
    if model.learned_positions:
        found["max_position_embeddings"] = model.position_rows  # Megatron counts them together
    elif not found["rope_scaling"] or (model.rope_scaling or {}).get("rope_type") not in ("dynamic", "longrope"):
        found["max_position_embeddings"] = None
    return found


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
