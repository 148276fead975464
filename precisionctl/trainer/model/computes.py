"""Which models GPT computes: each field of ModelShape is here, with what it is not computed beside."""

from collections.abc import Iterator, Mapping

from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_fields import PARTS
from precisionctl.model.model_shape import ModelShape

COMPUTED = frozenset(
    " ".join(
        (
            "architecture wrapper",  # names
            "make_vocab_size_divisible_by hf_zero_centered_gamma hf_expert_bias unread_positions",  # storage
            "mtp_num_layers mtp_dense mtp_output_layers",  # carried along: no logits come from them
            "num_layers hidden_size ffn_hidden_size vocab_size padded_vocab_size max_position_embeddings",
            "norm_epsilon normalization zero_centered_gamma norm_bias norm_weight pre_layernorms final_gamma_whole",
            "post_layernorms post_norm_epsilon scaled_post_layernorms norm_gate_rank layer_scalar",
            "parallel_residual shared_layernorm residual_multiplier residual_gate_temperature attn_res_block_size",
            "laurel_rank activation gated_linear_unit activation_clamp glu_offset swiglu_limits activation_sparsity",
            "use_double_wide_mlp",
            "position_embedding lerope rope_layers rotary_base rotary_base_local rotary_percent rotary_interleaved",
            "rope_scaling",  # its kinds: `_SCALINGS` in `positions.py`
            "num_attention_heads num_query_groups kv_channels v_head_dim num_kv_shared_layers",
            "sliding_window window_layers attention_chunk_size",
            "query_pre_attn_scalar query_scaling_beta query_scaling_floor softmax_scaling softmax_offset",
            "attn_logit_softcapping clip_qkv qk_layernorm qk_layernorm_over_heads qk_layernorm_after_rope",
            "qk_l2_norm qk_l2_norm_everywhere v_l2_norm keys_are_values attention_value_scale",
            "attention_output_gate attention_output_norm head_wise_attn_gate linear_gate stores_unused",
            "embedding_multiplier rounded_embedding_multiplier embedding_norm embedding_layernorm per_layer_embed_dim",
            "per_layer_vocab_size",
            "tied_embeddings logit_multiplier logits_scaling final_logit_softcapping",
            "qkv_bias proj_bias mlp_bias output_bias add_bias_linear add_qkv_bias",
            "global_attention global_attention.num_attention_heads global_attention.num_query_groups",
            "global_attention.kv_channels global_attention.keys_are_values global_attention.rotary_percent",
            "global_attention.softmax_offset",
            "mla mla.q_lora_rank mla.kv_lora_rank mla.qk_head_dim mla.qk_pos_emb_head_dim mla.v_head_dim",
            "mla.query_gate mla.nope_keys_by_head mla.kv_source_layers",
            "dsa dsa.n_heads dsa.head_dim dsa.topk dsa.layers dsa.rope_interleaved dsa.kpool",  # `longest_text`
            "msa msa.n_heads msa.head_dim msa.block_size msa.topk_blocks msa.local_blocks msa.layers msa.averaged",
            "csa csa.pattern csa.window_size csa.q_lora_rank csa.o_groups csa.o_lora_rank csa.n_heads csa.head_dim",
            "csa.topk",
            "mhc mhc.num_residual_streams mhc.mhc_sinkhorn_iterations mhc.epsilon mhc.magnitude mhc.lowrank",
            "mhc.mean_head",
            "altup altup.num_inputs altup.coef_clip",
            "ple ple.layers ple.embed_dim ple.conv_kernel_dim ple.ngram_size ple.heads_per_ngram",
            "ple.vocab_size_base ple.vocab_divisor ple.split_parts ple.end_token",
            "moe moe.num_experts moe.topk moe.ffn_hidden_size moe.shared_ffn_hidden_size moe.layer_freq",
            "moe.score_function moe.pre_softmax moe.topk_scaling_factor moe.logit_multiplier moe.sparsemixer_eps",
            "moe.expert_bias moe.expert_bias_on_logits moe.router_bias moe.n_hash_layers",
            "moe.num_groups moe.group_topk moe.group_scores",
            "moe.latent_size moe.latent_norm moe.probs_on_input moe.activation_clamp moe.swiglu_limits",
            "moe.shared_expert_gate moe.shared_average moe.own_norms moe.expert_norms moe.post_layernorm",
            "gdn gdn.layers gdn.num_key_heads gdn.num_value_heads gdn.key_head_dim gdn.value_head_dim",
            "gdn.conv_kernel_dim gdn.allow_neg_eigval gdn.norm_epsilon gdn.output_gate",
            "gdn.kda gdn.kda_lora_rank gdn.kda_lower_bound gdn.kda_full_gate",
            "short_conv short_conv.layers short_conv.kernel_dim",
            "mamba mamba.pattern mamba.num_heads mamba.head_dim mamba.num_groups mamba.state_dim mamba.dt_rank",
            "mamba.gated_norm mamba.bcdt_layernorm mamba.bcdt_l2_norm_epsilon",
            "heterogeneous heterogeneous.num_query_groups heterogeneous.ffn_hidden_size",
            "multipliers multipliers.attention_in multipliers.attention_out multipliers.key multipliers.mlp",
            "multipliers.ssm_in multipliers.ssm_out multipliers.ssm",
        )
    ).split()
)
"""Every field that GPT heeds, or that says nothing of what is computed."""

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
    refused = [
        name for name, value in values.items() if name not in COMPUTED or value not in KNOWN_VALUES.get(name, (value,))
    ]
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
