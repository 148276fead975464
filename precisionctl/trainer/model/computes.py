"""Which models GPT computes: what it does not compute beside what.

It heeds every field of ModelShape but those of names, storage and prediction layers, from which no logits come
(tests/architectures/test_same_model.py changes each one). `positions.py` has the kinds of `rope_scaling`.
"""

from collections.abc import Iterator, Mapping

from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_fields import PARTS
from precisionctl.model.model_shape import ModelShape

KNOWN_VALUES: Mapping[str, tuple[object, ...]] = {
    "normalization": ("RMSNorm", "LayerNorm"),
    "position_embedding": ("rope", "learned_absolute", "alibi"),
    "moe.score_function": ("softmax", "sigmoid", "sqrtsoftplus"),
}
"""Values that it heeds, of fields that may have others."""

GROUPED_QUERIES_ALONE: Mapping[str, object] = {
    **dict.fromkeys(("qk_layernorm", "qk_l2_norm", "v_l2_norm", "keys_are_values", "attention_output_gate"), False),
    **dict.fromkeys(("attention_output_norm", "head_wise_attn_gate"), False),
    **dict.fromkeys(("clip_qkv", "query_pre_attn_scalar"), None),
    "attention_value_scale": 1.0,
    "pre_layernorms": True,
    **dict.fromkeys(("parallel_residual", "add_bias_linear", "add_qkv_bias"), False),
}
"""What latent attention, and that with compressed keys, compute of these; grouped queries heed them."""

COMPUTED_BESIDE: Mapping[str, Mapping[str, object]] = {
    "mla": {**GROUPED_QUERIES_ALONE, "rotary_percent": 1.0},
    "gdn": {
        "parallel_residual": False,
        "add_bias_linear": False,
        "attention_chunk_size": None,
    },
    "short_conv": {
        **dict.fromkeys(("gdn", "mamba", "csa", "attention_chunk_size"), None),
        **dict.fromkeys(("parallel_residual", "add_bias_linear"), False),
        "pre_layernorms": True,
        "num_kv_shared_layers": 0,
    },
    "mamba": {  # each layer is one block
        "pre_layernorms": True,
        **dict.fromkeys(("mla", "dsa", "gdn", "attention_chunk_size", "per_layer_embed_dim"), None),
        "parallel_residual": False,
        "post_layernorms": False,
        "layer_scalar": False,
        "add_bias_linear": False,
    },
    "csa": {
        **GROUPED_QUERIES_ALONE,
        **dict.fromkeys(("mla", "dsa", "gdn", "mamba", "global_attention", "rope_layers", "sliding_window"), None),
        **dict.fromkeys(("attention_chunk_size", "attn_logit_softcapping", "query_scaling_beta"), None),
        **dict.fromkeys(("per_layer_embed_dim", "v_head_dim", "linear_gate"), None),
        **dict.fromkeys(("softmax_offset", "rotary_interleaved", "post_layernorms", "layer_scalar"), False),
        "position_embedding": "rope",
        "residual_multiplier": 1.0,
        "num_query_groups": 1,
        "num_kv_shared_layers": 0,
    },
    "mhc": {
        **dict.fromkeys(("short_conv", "mamba", "per_layer_embed_dim", "norm_gate_rank"), None),
        **dict.fromkeys(("post_layernorms", "layer_scalar", "stores_unused"), False),
        "residual_multiplier": 1.0,
    },
    "mhc.lowrank": {
        **dict.fromkeys(("mla", "csa", "global_attention"), None),
        **dict.fromkeys(("pre_layernorms", "parallel_residual"), False),
        "normalization": "RMSNorm",
        "num_kv_shared_layers": 0,
    },
    "altup": {  # Gemma 3n's layers
        **dict.fromkeys(("mla", "csa", "mhc", "ple", "moe", "gdn", "short_conv", "mamba", "heterogeneous"), None),
        **dict.fromkeys(("attn_res_block_size", "residual_gate_temperature", "norm_gate_rank"), None),
        **dict.fromkeys(("parallel_residual", "layer_scalar"), False),
        **dict.fromkeys(("pre_layernorms", "post_layernorms"), True),
        "residual_multiplier": 1.0,
        "mtp_num_layers": 0,
    },
    "attn_res_block_size": {  # Kimi K3's layers
        **dict.fromkeys(
            ("dsa", "msa", "csa", "mhc", "ple", "mamba", "short_conv", "rope_scaling", "sliding_window"), None
        ),
        **dict.fromkeys(
            ("post_layernorms", "layer_scalar", "parallel_residual", "stores_unused", "softmax_scaling"), False
        ),
        **dict.fromkeys(("per_layer_embed_dim", "norm_gate_rank", "mla.kv_source_layers", "query_scaling_beta"), None),
        **dict.fromkeys(("softmax_offset", "mla.query_gate", "mla.nope_keys_by_head"), False),
        "activation": "situ",
        "linear_gate": "sigmoid per element",
        "gdn.kda_full_gate": True,
        "residual_multiplier": 1.0,
        "normalization": "RMSNorm",
        "mtp_num_layers": 0,
    },
    "heterogeneous": {
        **dict.fromkeys(("mla", "dsa", "msa", "csa", "mhc", "ple", "moe", "gdn", "short_conv", "mamba"), None),
        **dict.fromkeys(("global_attention", "norm_gate_rank", "residual_gate_temperature", "linear_gate"), None),
        **dict.fromkeys(("per_layer_embed_dim", "attn_res_block_size"), None),
        **dict.fromkeys(("parallel_residual", "post_layernorms", "layer_scalar", "stores_unused"), False),
        "pre_layernorms": True,
        "num_kv_shared_layers": 0,
        "mtp_num_layers": 0,
    },
    "msa": {
        **dict.fromkeys(("mla", "dsa", "csa", "mamba", "global_attention", "sliding_window"), None),
        **dict.fromkeys(("attention_chunk_size", "attn_logit_softcapping", "linear_gate"), None),
        **dict.fromkeys(("softmax_offset", "rotary_interleaved", "parallel_residual"), False),
        "normalization": "RMSNorm",
        "num_kv_shared_layers": 0,
    },
}
"""What a model may have, each with what is computed beside it of other fields. All that apply hold, so that no order
says anything; what depends on something else too is in `_not_together`."""


NOT_BESIDE: Mapping[str, tuple[str, ...]] = {
    "output_bias": ("tied_embeddings",),
    "norm_gate_rank": ("gdn", "parallel_residual", "moe.own_norms"),
    "scaled_post_layernorms": ("gdn", "short_conv", "mamba", "mhc", "layer_norms"),
    "residual_gate_temperature": ("mamba", "mhc", "parallel_residual"),
    "per_layer_embed_dim": ("xielu",),
    "activation_sparsity": ("moe",),
    "add_bias_linear": ("moe.latent_size",),
    "v_head_dim": ("attention_output_gate", "keys_are_values", "global_keys_are_values", "stores_unused"),
    "clip_qkv": ("attention_output_gate", "head_wise_attn_gate"),
    "num_kv_shared_layers": ("mla", "gdn", "mamba", "head_wise_attn_gate"),
    "softmax_offset": ("attn_logit_softcapping",),
    "softmax_scaling": ("query_scaling_beta",),
    "global_attention": ("mla",),
    "mla.kv_source_layers": ("fused_latent_layernorms",),
    "mhc.lowrank": ("mhc.mixed",),
    "moe.own_norms": ("mamba", "mhc", "moe.latent_size"),
    "moe.post_layernorm": ("mhc",),
}
"""Fields, each with what of a model it is not computed beside."""

ONLY_BESIDE: Mapping[str, str] = {
    "norm_gate_rank": "mla",
    "softmax_scaling": "mla",
    "ple": "mhc.lowrank",
    "laurel_rank": "altup",
    "activation_sparsity": "gated_linear_unit",
    "per_layer_vocab_size": "per_layer_embed_dim",
    "moe.n_hash_layers": "csa",
    "moe.expert_norms": "moe.latent_size",
    "moe.latent_norm": "moe.latent_size",
    "gdn.kda_full_gate": "attn_res_block_size",
}
"""Fields, each with what of a model it is computed beside alone."""


def check(model: ModelShape) -> None:
    """Raise UnknownArchitecture for a model of which GPT does not compute all, naming each field."""
    values = dict(named_values(model))
    refused = [name for name, known in KNOWN_VALUES.items() if name in values and values[name] not in known]
    refused += [
        name
        for part, computed in COMPUTED_BESIDE.items()
        if model.has(part)
        for name, value in computed.items()
        if values.get(name) != value
    ]
    refused += [name for name, others in NOT_BESIDE.items() if model.has(name) and any(map(model.has, others))]
    refused += [name for name, other in ONLY_BESIDE.items() if model.has(name) and not model.has(other)]
    refused += [name for name, holds in _not_together(model).items() if holds]
    if refused:
        named = ", ".join(f"{name}={shown(values.get(name))}" for name in dict.fromkeys(refused))
        raise UnknownArchitecture(f"`{model.architecture}` is not computed here with {named}")


def _not_together(model: ModelShape) -> Mapping[str, object]:
    """Fields, each with whether the model has it beside values, or several other fields, that GPT does not compute it
    with."""
    mla, dsa, msa, csa = model.mla, model.dsa, model.msa, model.csa
    mhc, moe, gdn, mamba = model.mhc, model.moe, model.gdn, model.mamba
    return {
        "mla.query_gate": mla and mla.query_gate and not (dsa and model.query_latent),
        "dsa": dsa and model.query_latent == model.softmax_scaling,
        "msa.n_heads": msa and not msa.averaged and msa.n_heads != model.num_query_groups,
        "msa.head_dim": msa and model.rotary_size > msa.head_dim,
        "csa": csa and not (mhc and moe and all(moe.layer_freq)),
        "mhc": mhc and not csa and not mla and not mhc.lowrank,
        "altup": model.altup and not (model.laurel_rank and model.per_layer_embed_dim),
        "gdn": gdn and ((mhc and gdn.kda == bool(mhc.lowrank)) or (msa and not mhc)),
        "moe.sparsemixer_eps": moe
        and moe.sparsemixer_eps
        and (moe.score_function != "softmax" or moe.expert_bias or moe.num_groups),
        "mamba.dt_rank": mamba
        and mamba.dt_rank is not None
        and (mamba.parallel or mamba.gated_norm or mamba.head_dim * mamba.num_groups > 1),
        "mamba.bcdt_layernorm": mamba
        and mamba.bcdt_layernorm
        and (mamba.dt_rank is None or mamba.bcdt_l2_norm_epsilon is not None),
        "mamba.bcdt_l2_norm_epsilon": mamba and mamba.dt_rank is None and mamba.bcdt_l2_norm_epsilon is not None,
        "linear_gate": model.linear_gate
        and not mla
        and (gdn or mamba or model.parallel_residual or not model.pre_layernorms),
        "swiglu_limits": (model.swiglu_limits or (moe and moe.swiglu_limits)) and model.activation == "situ",
        "position_embedding": model.alibi
        and (mla or csa or msa or model.softmax_offset or model.attn_logit_softcapping),
        "residual_gate_temperature": model.residual_gate_temperature and model.residual_multiplier != 1,
        "multipliers": bool(model.multipliers) != model.parallel_mixers
        or (model.multipliers and not model.gated_linear_unit),
        "activation": (model.xielu and (moe or model.gated_linear_unit))
        or (model.activation == "situ" and not model.gated_linear_unit)
        or (gdn and model.activation != "silu" and not model.attn_res_block_size),
        "pre_layernorms": msa and not model.pre_layernorms and not (mhc and mhc.lowrank),
        "attn_res_block_size": model.attn_res_block_size
        and (any(model.rope_layers or (True,)) or not model.query_latent),
    }


def longest_text(model: ModelShape) -> int:
    """The most tokens of a text that GPT computes: the model's positions, or as many keys as sparse attention chooses,
    if these are fewer."""
    longest = model.max_position_embeddings
    return min(longest, model.dsa.topk) if model.dsa else longest


def named_values(model: ModelShape) -> Iterator[tuple[str, object]]:
    """Each field with its value, and then those of its PARTS, with a dot in their names."""
    yield from vars(model).items()
    for part in PARTS:
        fields = vars(found) if (found := getattr(model, part)) else {}
        yield from ((f"{part}.{name}", value) for name, value in fields.items())
