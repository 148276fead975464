"""Keys that engines require in config.json and transformers 5 does not write, and which of them a config lacks."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from precisionctl.engines.rules.fixed_settings import dense_layers_first
from precisionctl.quant_methods.compressed_tensors import OLDER_KEY

MissingKeys = Callable[[Mapping[str, Any]], Iterator[str]]
"""From the text model's part of a config.json, the required keys that it lacks, or has in words that the engine does
not know. The part has what a wrapper says of the whole, its `model_type` and how weights are coded, where it says
nothing else of them."""


ADDED = "The release's config.json has it, and that of transformers 5 has not: `export-inference` writes it"
"""In rules on such keys: what to do."""

OF_DEEPSEEK_V4 = ("compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling", "topk_method")
"""Those of DeepSeek-V4's released config.json that transformers has others for."""


def quantization_config_under_this_name(config: Mapping[str, Any]) -> Iterator[str]:
    """`quantization_config` where a Reader has taken compressed-tensors' older key for it: then both are one object."""
    if config.get("quantization_config") and config["quantization_config"] is config.get(OLDER_KEY):
        yield "quantization_config"


def published_by(keys: Mapping[object, tuple[str, ...]]) -> MissingKeys:
    """Those of the config's model."""

    def lacks(config: Mapping[str, Any]) -> Iterator[str]:
        yield from (key for key in keys.get(config.get("model_type"), ()) if config.get(key) is None)

    return lacks


def number_of_dense_layers(model_types: Collection[str]) -> MissingKeys:
    """How many leading layers of these models have no experts, or another number than `mlp_layer_types` says; where
    dense layers are behind others, no number can say it."""

    def lacks(config: Mapping[str, Any]) -> Iterator[str]:
        if config.get("model_type") not in model_types or dense_layers_first(config):
            return
        key = "first_k_dense_replace"
        said, kinds = config.get(key), config.get("mlp_layer_types")
        if said is None or (isinstance(kinds, list) and said != kinds.count("dense")):
            yield key

    return lacks


def of_models(model_types: tuple[str, ...], *keys: str) -> MissingKeys:
    """These keys, in a config of these models."""
    return published_by(dict.fromkeys(model_types, keys))


def of_minimax_m3(config: Mapping[str, Any]) -> Iterator[str]:
    """The published words of MiniMax-M3's text model, which transformers reads and does not write. What turns is said
    by `rope_parameters` there."""
    if config.get("model_type") not in ("minimax_m3_vl", "minimax_m3_vl_text"):
        return
    if config.get("hidden_act") != "swigluoai":
        yield "hidden_act"
    rope = config.get("rope_parameters")
    turning = [key for key in ("rope_theta", "partial_rotary_factor") if isinstance(rope, Mapping) and key in rope]
    yield from (key for key in ("moe_layer_freq", "sparse_attention_config", *turning) if config.get(key) is None)


def of_hy_v4(config: Mapping[str, Any]) -> Iterator[str]:
    """The published words of Hunyuan 4, for what transformers' class always has and does not write, and for its kind of
    layers."""
    if config.get("model_type") != "hy_v4":
        return
    switches = ("gated_mla", "gating_type", "learnable_sink", "enable_ihc")
    yield from (key for key in switches if config.get(key) is None)
    layers = config.get("layer_types")
    if not isinstance(layers, list) or layers != ["deepseek_sparse_attention"] * len(layers):
        yield "layer_types"


_PUBLISHED: Mapping[object, tuple[str, ...]] = {
    "exaone": ("ExaoneForCausalLM", "num_layers", "activation_function", "layer_norm_epsilon"),
    "phimoe": ("PhiMoEForCausalLM",),
    "sarvam_mla": ("SarvamMLAForCausalLM", "num_experts", "num_shared_experts"),
    "sarvam_moe": (
        *("SarvamMoEForCausalLM", "num_experts", "num_shared_experts", "use_qkv_bias", "use_bias", "score_function"),
        *("moe_router_enable_expert_bias", "embedding_dropout"),
    ),
}


def of_published_classes(config: Mapping[str, Any]) -> Iterator[str]:
    """The class and the words of config.json under which a model was published, where transformers writes others: it
    takes the model for another family's, or (Phi-3.5-MoE) spells the class in another way. YaRN has another name there.
    """
    published = _PUBLISHED.get(config.get("model_type"))
    if published is None:
        return
    of_class, *keys = published
    if "architectures" in config and config["architectures"] != [of_class]:
        yield "architectures"
    yield from (key for key in keys if config.get(key) is None)
    rope = config.get("rope_parameters")
    if of_class == "SarvamMLAForCausalLM" and isinstance(rope, Mapping) and rope.get("rope_type") == "yarn":
        yield from (key for key in ("rope_scaling", "rope_theta") if config.get(key) is None)


_OF_MIMO_V2_FLASH = (
    *("hybrid_layer_pattern", "moe_layer_freq", "layernorm_epsilon", "sliding_window_size", "swa_num_attention_heads"),
    *("swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim", "add_swa_attention_sink_bias", "rope_theta"),
    *("swa_rope_theta", "partial_rotary_factor"),
)
IN_VLLM: Mapping[object, tuple[str, ...]] = {
    "afmoe": ("score_func", "route_norm", "n_group", "topk_group"),
    "deepseek_v3": ("topk_method", "scoring_func"),
    "deepseek_v32": ("topk_method", "scoring_func"),
    "glm_moe_dsa": ("topk_method", "scoring_func", "indexer_rope_interleave"),
    "hy_v3": ("expert_hidden_dim", "qk_norm", "route_norm"),
    "lfm2": ("conv_dim", "block_dim"),
    "mimo_v2_flash": _OF_MIMO_V2_FLASH,
    "minimax_m2": ("scoring_func", "use_routing_bias", "rotary_dim"),
    **dict.fromkeys(("muse_spark", "muse_spark_text"), ("num_shared_experts",)),
    **dict.fromkeys(
        ("step3p5", "step3p7"),
        ("use_head_wise_attn_gate", "use_moe_router_bias", "norm_expert_weight", "need_fp32_gate"),
    ),
}
IN_SGLANG: Mapping[object, tuple[str, ...]] = {
    "afmoe": ("score_func",),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), ("topk_method", "scoring_func", "moe_layer_freq")),
    "deepseek_v32": ("topk_method", "scoring_func", "moe_layer_freq"),
    "exaone_moe": ("is_moe_layer",),
    "glm_moe_dsa": ("topk_method", "scoring_func", "moe_layer_freq", "indexer_rope_interleave"),
    "hy_v3": ("qk_norm", "route_norm"),
    "mimo_v2_flash": (*_OF_MIMO_V2_FLASH, "topk_method", "scoring_func"),
    "minimax_m2": ("scoring_func", "use_routing_bias", "use_qk_norm", "rotary_dim"),
    **dict.fromkeys(("muse_spark", "muse_spark_text"), ("num_shared_experts",)),
}
"""Published keys that transformers' class does not write and the engine's model asks for, or takes for another's where
they are missing, by `model_type`."""


def of_shared_indexers(config: Mapping[str, Any]) -> Iterator[str]:
    """What says which indexers of GLM-5 serve several layers, in another word than transformers' `indexer_types`."""
    layers = config.get("indexer_types")  # of a wrapper without a table it may be anything
    shared = isinstance(layers, list) and "shared" in layers
    if (
        config.get("model_type") == "glm_moe_dsa"
        and shared
        and config.get("index_topk_pattern") is None
        and config.get("index_topk_freq") in (None, 1)
    ):
        yield "index_topk_pattern"


def of_growing_queries(config: Mapping[str, Any]) -> Iterator[str]:
    """How the queries of Ministral 3 grow with their position, which transformers reads within `rope_parameters`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    grow = isinstance(rope, Mapping) and rope.get("llama_4_scaling_beta")
    if config.get("model_type") == "ministral3" and grow and config.get("llama_4_scaling") is None:
        yield "llama_4_scaling"


MUSE_GLIMMER = (
    *("head_dim", "hidden_activation", "rope_parameters", "layer_rope_theta", "qk_scale_factor"),
    "final_logit_softcapping",
)
"""Keys of Muse Glimmer that transformers' class writes and has defaults for."""

GLM5_NEXT = ("glm5_next", "glm5_next_text")
"""GLM-5.3, whose released config.json has words that transformers' class does not write."""


def rotary_of_transformers_4(config: Mapping[str, Any]) -> Iterator[str]:
    """The keys of transformers 4 that a config with `rope_parameters` lacks. Configs whose `rope_parameters` differ by
    kind of layer have no counterpart there."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        return
    required = {
        "rope_theta": rope.get("rope_theta") is not None,  # OLMo Hybrid says null where nothing turns
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1) != 1,
        "rope_scaling": rope.get("rope_type", "default") != "default",
    }
    yield from (key for key, needed in required.items() if needed and key not in config)
