"""Which models GPT computes: each field of ModelShape is here with the values that it heeds, or with `ANY`."""

from collections.abc import Iterator, Mapping
from typing import get_args

from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model_fields import PARTS, Activation
from precisionctl.model_shape import ModelShape

ANY = None
"""Every value that a ModelShape may have."""

COMPUTED: Mapping[str, tuple[object, ...] | None] = {
    **dict.fromkeys(("architecture", "wrapper"), ANY),  # names
    **dict.fromkeys(("make_vocab_size_divisible_by", "hf_zero_centered_gamma", "unread_positions"), ANY),  # storage
    **dict.fromkeys(("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size", "padded_vocab_size"), ANY),
    **dict.fromkeys(("num_attention_heads", "num_query_groups", "kv_channels", "max_position_embeddings"), ANY),
    **dict.fromkeys(
        ("norm_epsilon", "zero_centered_gamma", "gated_linear_unit", "activation_clamp", "glu_offset"), ANY
    ),
    **dict.fromkeys(("rotary_base", "rotary_base_local", "rotary_percent", "sliding_window", "window_layers"), ANY),
    **dict.fromkeys(("qk_layernorm", "query_pre_attn_scalar", "attn_logit_softcapping", "softmax_offset"), ANY),
    **dict.fromkeys(("final_logit_softcapping", "embedding_multiplier", "rounded_embedding_multiplier"), ANY),
    **dict.fromkeys(
        ("post_layernorms", "tied_embeddings", "norm_gate_rank", "embedding_norm", "embedding_layernorm"), ANY
    ),
    **dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias", "add_bias_linear", "add_qkv_bias"), ANY),
    **dict.fromkeys(("rope_layers", "rotary_interleaved", "qk_layernorm_over_heads", "output_bias", "norm_bias"), ANY),
    **dict.fromkeys(("qk_layernorm_after_rope", "query_scaling_beta", "query_scaling_floor"), ANY),
    **dict.fromkeys(("attention_chunk_size", "qk_l2_norm", "moe.probs_on_input", "moe.own_norms"), ANY),
    **dict.fromkeys(("qk_l2_norm_everywhere", "post_norm_epsilon", "final_gamma_whole"), ANY),
    **dict.fromkeys(("attention_output_norm", "scaled_post_layernorms", "residual_gate_temperature"), ANY),
    **dict.fromkeys(("moe.expert_norms", "moe.logit_multiplier"), ANY),
    **dict.fromkeys(("v_head_dim", "attention_value_scale", "global_attention.softmax_offset"), ANY),
    **dict.fromkeys(("clip_qkv", "norm_weight", "linear_gate", "global_attention.num_attention_heads"), ANY),
    **dict.fromkeys(("v_l2_norm", "keys_are_values", "layer_scalar", "global_attention"), ANY),
    **dict.fromkeys(("num_kv_shared_layers", "use_double_wide_mlp", "stores_unused", "per_layer_embed_dim"), ANY),
    **dict.fromkeys(("global_attention.num_query_groups", "global_attention.kv_channels"), ANY),
    **dict.fromkeys(("global_attention.keys_are_values", "global_attention.rotary_percent"), ANY),
    **dict.fromkeys(("pre_layernorms", "parallel_residual", "shared_layernorm"), ANY),
    **dict.fromkeys(("residual_multiplier", "logit_multiplier", "logits_scaling"), ANY),
    **dict.fromkeys(("moe.shared_expert_gate", "moe.shared_average"), ANY),
    **dict.fromkeys(
        ("rope_scaling", "mla", "dsa", "msa", "csa", "mhc", "moe", "gdn", "mamba", "attention_output_gate"), ANY
    ),  # kinds of scaling: `_SCALINGS` in `positions.py`; the others by their own fields
    **dict.fromkeys(("mtp_num_layers", "mtp_dense"), ANY),  # carried along: no logits come from them
    "normalization": ("RMSNorm", "LayerNorm"),
    "activation": get_args(Activation),
    "position_embedding": ("rope", "learned_absolute", "alibi"),
    **dict.fromkeys(("mla.q_lora_rank", "mla.kv_lora_rank", "mla.qk_head_dim"), ANY),
    **dict.fromkeys(("mla.qk_pos_emb_head_dim", "mla.v_head_dim", "mla.query_gate", "mla.nope_keys_by_head"), ANY),
    **dict.fromkeys(("mla.kv_source_layers", "softmax_scaling", "lerope"), ANY),
    # texts longer than `dsa.topk` are refused, where they are met
    **dict.fromkeys(("dsa.n_heads", "dsa.head_dim", "dsa.topk", "dsa.layers", "dsa.rope_interleaved"), ANY),
    "dsa.kpool": ANY,
    **dict.fromkeys(("msa.n_heads", "msa.head_dim", "msa.block_size", "msa.topk_blocks", "msa.local_blocks"), ANY),
    **dict.fromkeys(("msa.layers", "msa.averaged"), ANY),
    **dict.fromkeys(("moe.num_experts", "moe.topk", "moe.ffn_hidden_size", "moe.layer_freq"), ANY),
    **dict.fromkeys(("moe.shared_ffn_hidden_size", "moe.pre_softmax", "moe.topk_scaling_factor"), ANY),
    **dict.fromkeys(("moe.expert_bias", "moe.router_bias", "moe.latent_size", "moe.sparsemixer_eps"), ANY),
    **dict.fromkeys(("moe.expert_bias_on_logits", "moe.post_layernorm", "hf_expert_bias"), ANY),
    **dict.fromkeys(("moe.activation_clamp", "moe.latent_norm", "attn_res_block_size", "gdn.kda_full_gate"), ANY),
    **dict.fromkeys(("moe.num_groups", "moe.group_topk", "moe.group_scores"), ANY),
    "moe.n_hash_layers": ANY,
    "moe.score_function": ("softmax", "sigmoid", "sqrtsoftplus"),
    **dict.fromkeys(("csa.pattern", "csa.window_size", "csa.q_lora_rank", "csa.o_groups", "csa.o_lora_rank"), ANY),
    **dict.fromkeys(("csa.n_heads", "csa.head_dim", "csa.topk"), ANY),
    **dict.fromkeys(("mhc.num_residual_streams", "mhc.mhc_sinkhorn_iterations", "mhc.epsilon", "mhc.magnitude"), ANY),
    **dict.fromkeys(("mhc.lowrank", "mhc.mean_head", "ple", "ple.layers", "ple.embed_dim", "ple.conv_kernel_dim"), ANY),
    **dict.fromkeys(("ple.ngram_size", "ple.heads_per_ngram", "ple.vocab_size_base", "ple.vocab_divisor"), ANY),
    **dict.fromkeys(("ple.split_parts", "ple.end_token", "gdn.output_gate"), ANY),
    **dict.fromkeys(("gdn.layers", "gdn.num_key_heads", "gdn.num_value_heads", "gdn.key_head_dim"), ANY),
    **dict.fromkeys(("gdn.value_head_dim", "gdn.conv_kernel_dim", "gdn.allow_neg_eigval", "gdn.norm_epsilon"), ANY),
    **dict.fromkeys(("gdn.kda", "gdn.kda_lora_rank", "gdn.kda_lower_bound"), ANY),
    **dict.fromkeys(("short_conv", "short_conv.layers", "short_conv.kernel_dim"), ANY),
    **dict.fromkeys(("mamba.pattern", "mamba.num_heads", "mamba.head_dim", "mamba.num_groups", "mamba.state_dim"), ANY),
    "mamba.dt_rank": ANY,
    **dict.fromkeys(("mamba.gated_norm", "multipliers", "multipliers.attention_in", "multipliers.attention_out"), ANY),
    **dict.fromkeys(("multipliers.key", "multipliers.ssm_in", "multipliers.ssm_out", "multipliers.ssm"), ANY),
    "multipliers.mlp": ANY,
}

GROUPED_QUERIES_ALONE: Mapping[str, object] = {
    **dict.fromkeys(("qk_layernorm", "qk_l2_norm", "v_l2_norm", "keys_are_values", "attention_output_gate"), False),
    "attention_output_norm": False,
    **dict.fromkeys(("clip_qkv", "query_pre_attn_scalar"), None),
    "attention_value_scale": 1.0,
    "pre_layernorms": True,
    **dict.fromkeys(("parallel_residual", "add_bias_linear", "add_qkv_bias"), False),
}
"""What latent attention, and that with compressed keys, compute of these; grouped queries heed them."""

BESIDE_MLA: Mapping[str, object] = {**GROUPED_QUERIES_ALONE, "rotary_percent": 1.0}
"""What layers with latent attention compute of these."""

BESIDE_DELTA_NETS: Mapping[str, object] = {
    "parallel_residual": False,
    "add_bias_linear": False,
    "activation": "silu",
    "attention_chunk_size": None,
}
"""What layers with a gated delta net compute of these; those with attention heed them."""

BESIDE_SHORT_CONVS: Mapping[str, object] = {
    **dict.fromkeys(("gdn", "mamba", "csa", "attention_chunk_size"), None),
    **dict.fromkeys(("parallel_residual", "add_bias_linear"), False),
    "pre_layernorms": True,
    "num_kv_shared_layers": 0,
}
"""What a model with short convolutions computes of these."""

BESIDE_MIXERS: Mapping[str, object] = {
    "pre_layernorms": True,
    **dict.fromkeys(("mla", "dsa", "gdn", "attention_chunk_size", "per_layer_embed_dim"), None),
    "parallel_residual": False,
    "post_layernorms": False,
    "layer_scalar": False,
    "add_bias_linear": False,
}
"""What a model whose layers are one block each, some of them Mamba-2 mixers, computes of these; others heed them."""

BESIDE_CSA: Mapping[str, object] = {
    **GROUPED_QUERIES_ALONE,
    **dict.fromkeys(("mla", "dsa", "gdn", "mamba", "global_attention", "rope_layers", "sliding_window"), None),
    **dict.fromkeys(("attention_chunk_size", "attn_logit_softcapping", "query_scaling_beta"), None),
    **dict.fromkeys(("per_layer_embed_dim", "v_head_dim", "linear_gate"), None),
    **dict.fromkeys(("softmax_offset", "rotary_interleaved", "post_layernorms", "layer_scalar"), False),
    "position_embedding": "rope",
    "residual_multiplier": 1.0,
    "num_query_groups": 1,
    "num_kv_shared_layers": 0,
}
"""What layers with compressed keys compute of these."""

BESIDE_STREAMS: Mapping[str, object] = {
    **dict.fromkeys(("short_conv", "mamba", "per_layer_embed_dim", "norm_gate_rank"), None),
    **dict.fromkeys(("post_layernorms", "layer_scalar", "stores_unused"), False),
    "residual_multiplier": 1.0,
}
"""What layers between several residual streams compute of these."""

BESIDE_LOWRANK: Mapping[str, object] = {
    **dict.fromkeys(("mla", "csa", "global_attention"), None),
    **dict.fromkeys(("pre_layernorms", "parallel_residual"), False),
    "normalization": "RMSNorm",
    "num_kv_shared_layers": 0,
}
"""What layers between streams that are read channel by channel compute of these."""

BESIDE_RESIDUALS: Mapping[str, object] = {
    **dict.fromkeys(("dsa", "msa", "csa", "mhc", "ple", "mamba", "short_conv", "rope_scaling", "sliding_window"), None),
    **dict.fromkeys(
        ("post_layernorms", "layer_scalar", "parallel_residual", "stores_unused", "softmax_scaling"), False
    ),
    **dict.fromkeys(("per_layer_embed_dim", "norm_gate_rank", "mla.kv_source_layers", "query_scaling_beta"), None),
    **dict.fromkeys(("softmax_offset", "mla.query_gate", "mla.nope_keys_by_head"), False),
    "activation": "situ",  # which other delta nets are not beside
    "linear_gate": "sigmoid per element",
    "gdn.kda_full_gate": True,
    "residual_multiplier": 1.0,
    "normalization": "RMSNorm",
    "mtp_num_layers": 0,
}
"""What a model with attention residuals computes of these: Kimi K3's layers."""

BESIDE_MSA: Mapping[str, object] = {
    **dict.fromkeys(("mla", "dsa", "csa", "mamba", "global_attention", "sliding_window"), None),
    **dict.fromkeys(("attention_chunk_size", "attn_logit_softcapping", "linear_gate"), None),
    **dict.fromkeys(("softmax_offset", "rotary_interleaved", "parallel_residual"), False),
    "normalization": "RMSNorm",
    "num_kv_shared_layers": 0,
}
"""What a model with indexers of blocks computes of these."""


def check(model: ModelShape) -> None:
    """Raise UnknownArchitecture for a model of which GPT does not compute all, naming each field."""
    unknown = [f"{name}={shown(value)}" for name, value in _not_computed(model)]
    if unknown:
        raise UnknownArchitecture(f"`{model.architecture}` is not computed here with {', '.join(unknown)}")


def longest_text(model: ModelShape) -> int:
    """The most tokens of a text that GPT computes: the model's positions, or as many keys as sparse attention chooses,
    if these are fewer."""
    longest = model.max_position_embeddings
    return min(longest, model.dsa.topk) if model.dsa else longest


def _not_computed(model: ModelShape) -> Iterator[tuple[str, object]]:
    values = dict(named_values(model))
    for name, value in values.items():
        heeded = COMPUTED.get(name, ())
        if heeded is not ANY and value not in heeded:
            yield name, value
    beside = {
        **(BESIDE_MLA if model.mla else {}),
        **(BESIDE_DELTA_NETS if model.gdn else {}),
        **(BESIDE_SHORT_CONVS if model.short_conv else {}),
        **(BESIDE_MIXERS if model.mamba else {}),
        **(BESIDE_CSA if model.csa else {}),
        **(BESIDE_STREAMS if model.mhc else {}),
        **(BESIDE_RESIDUALS if model.attn_res_block_size else {}),
        **(BESIDE_MSA if model.msa else {}),
        **(BESIDE_LOWRANK if model.mhc and model.mhc.lowrank else {"pre_layernorms": True} if model.msa else {}),
    }
    yield from ((name, values.get(name)) for name, value in beside.items() if values.get(name) != value)
    refused = {
        "output_bias": model.output_bias and model.tied_embeddings,
        "mla.query_gate": model.mla and model.mla.query_gate and not (model.dsa and model.query_latent),
        "norm_gate_rank": model.norm_gate_rank
        and (not model.mla or model.gdn or model.parallel_residual or (model.moe and model.moe.own_norms)),
        "dsa": model.dsa and model.query_latent == model.softmax_scaling,
        "softmax_scaling": model.softmax_scaling and (not model.mla or model.query_scaling_beta is not None),
        "mla.kv_source_layers": model.mla and model.mla.kv_source_layers and model.fused_latent_layernorms,
        "msa.n_heads": model.msa and not model.msa.averaged and model.msa.n_heads != model.num_query_groups,
        "msa.head_dim": model.msa and model.rotary_size > model.msa.head_dim,
        "csa": model.csa and not (model.mhc and model.moe and all(model.moe.layer_freq)),
        "mhc": model.mhc and not model.csa and not model.mla and not model.mhc.lowrank,
        "mhc.lowrank": model.mhc and model.mhc.lowrank and model.mhc.mixed,
        "gdn": model.gdn
        and ((model.mhc and model.gdn.kda == bool(model.mhc.lowrank)) or (model.msa and not model.mhc)),
        "ple": model.ple and not (model.mhc and model.mhc.lowrank),
        "moe.n_hash_layers": model.moe and model.moe.n_hash_layers and not model.csa,
        "moe.own_norms": model.moe and model.moe.own_norms and (model.mamba or model.mhc or model.latent_experts),
        "moe.post_layernorm": model.moe and model.moe.post_layernorm and model.mhc,
        "moe.expert_norms": model.moe and model.moe.expert_norms and not model.latent_experts,
        "scaled_post_layernorms": model.scaled_post_layernorms
        and (model.gdn or model.short_conv or model.mamba or model.mhc or model.layer_norms),
        "residual_gate_temperature": model.residual_gate_temperature
        and (model.mamba or model.mhc or model.parallel_residual or model.residual_multiplier != 1),
        "moe.sparsemixer_eps": model.moe
        and model.moe.sparsemixer_eps
        and (model.moe.score_function != "softmax" or model.moe.expert_bias or model.moe.num_groups),
        "add_bias_linear": model.add_bias_linear and model.latent_experts,
        "v_head_dim": model.v_head_dim
        and (
            model.attention_output_gate or model.keys_are_values or model.global_keys_are_values or model.stores_unused
        ),
        "clip_qkv": model.clip_qkv and model.attention_output_gate,
        "linear_gate": model.linear_gate
        and not model.mla
        and (model.gdn or model.mamba or model.parallel_residual or not model.pre_layernorms),
        "global_attention": model.global_attention and model.mla,
        "position_embedding": model.alibi
        and (model.mla or model.csa or model.msa or model.softmax_offset or model.attn_logit_softcapping is not None),
        "softmax_offset": model.softmax_offset and model.attn_logit_softcapping is not None,
        "num_kv_shared_layers": model.num_kv_shared_layers and (model.mla or model.gdn or model.mamba),
        "per_layer_embed_dim": model.per_layer_embed_dim and model.xielu,
        "multipliers": bool(model.multipliers) != model.parallel_mixers
        or (model.multipliers and not model.gated_linear_unit),
        "mamba.dt_rank": model.mamba
        and model.mamba.dt_rank is not None
        and (model.mamba.parallel or model.mamba.gated_norm or model.mamba.head_dim * model.mamba.num_groups > 1),
        "activation": (model.xielu and (model.moe or model.gated_linear_unit))
        or (model.activation == "situ" and not model.gated_linear_unit),
        "attn_res_block_size": model.attn_res_block_size
        and (any(model.rope_layers or (True,)) or not model.query_latent),
        "gdn.kda_full_gate": model.gdn and model.gdn.kda_full_gate and not model.attn_res_block_size,
        "moe.latent_norm": model.moe and model.moe.latent_norm and not model.latent_experts,
    }
    yield from ((name, values[name]) for name, holds in refused.items() if holds)


def named_values(model: ModelShape) -> Iterator[tuple[str, object]]:
    """Each field with its value, and then those of its PARTS, with a dot in their names."""
    yield from vars(model).items()
    for part in PARTS:
        fields = vars(found) if (found := getattr(model, part)) else {}
        yield from ((f"{part}.{name}", value) for name, value in fields.items())
