"""Which families another program judges: docs/families.md's table says it from here."""

from typing import Any

LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

CORE: dict[str, dict[str, Any]] = {
    "llama-2": {},
    "llama-3": {"rope_parameters": LLAMA_3_1},  # the only scaling of this kind that Megatron has
    "llama-tied": {},
    "llama-attention-bias": {},
    "llama-all-biases": {},
    "llama-head-dim": {},
    "yi": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {},
    "qwen3-moe": {},
    "phi3": {},
    "gpt2": {},
    "qwen3-5": {},
}
"""Written for one and two ranks, loaded by megatron-core, which computes transformers' logits."""

CORE_FIRST = ("dots1", "deepseek-v3", "ernie4-5", "smollm3", "qwen3-next")
CORE_LATER = (
    *("qwen2-window", "qwen3-moe-scores-of-all", "deepseek-v2", "qwen2-moe", "smollm3-window", "seed-oss", "ministral"),
    "deepseek",
    *("starcoder2", "arcee", "glm4-moe-lite", "internlm3", "stablelm", "glm4-moe", "gpt-oss", "qwen3-5-moe"),
    *("solar-open", "youtu", "hy-v3", "exaone-moe", "glm", "jais2", "iquestcoder", "cwm", "helium"),
    *("minicpm3-plain", "gpt-bigcode", "gpt-bigcode-by-head", "flint", "opt-without-biases"),
    *("exaone", "sarvam-moe", "sarvam-mla", "lara-mini", "nemotron-nas"),
)
"""As those, and saved again by megatron-core; the later ones in `make soak`."""

CORE_LOADS = (
    *("granite", "granite-moe", "granite-moe-shared", "granite-moe-swa", "granite-swa", "hunyuan", "hunyuan-moe"),
    *("llama4", "ministral3", "mistral4", "mellum", "gpt-neo", "mpt"),
)
"""megatron-core loads and saves these parameters, but cannot compute the model."""

CORE_HYBRIDS = ("nemotron-h", "granite-hybrid", "granite-hybrid-dense", "bamba", "mamba2")
"""The same, by megatron-core's hybrid model, whose mixers compute on GPUs alone."""

BRIDGE: dict[str, dict[str, Any]] = {
    "llama-3": {"num_hidden_layers": 5},
    "llama-tied": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3-moe": {"mlp_only_layers": []},  # Bridge's table of this family has no dense layers
    "glm4-moe": {"n_shared_experts": 1},  # nor has this one more than one shared expert
    "qwen3-next": {"mlp_only_layers": []},
    "nemotron-h": {},
    "nemotron-nas": {},
    "olmoe": {"num_key_value_heads": 4},  # nor has its norm of keys fewer heads than that of queries
}
"""Written by us, exported by Megatron-Bridge bit for bit, and read as Bridge saved it."""

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Sizes that vLLM's kernels for CPUs take: heads of 32 channels and more, and latents of 512."""

_WIDE_LATENTS = {
    **{size: WIDE[size] for size in ("hidden_size", "intermediate_size")},
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_LONG = [1 + number % 8 / 2 for number in range(32)]

VLLM: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *(
                "llama-3",
                "llama-tied",
                "llama-all-biases",
                "mistral",
                "mixtral",
                "ministral",
                "nemotron",
                "jais2",
                "gpt2",
            ),
            *("qwen2", "qwen3", "qwen2-moe", "qwen3-moe", "qwen3-moe-scores-of-all", "phi3", "phi", "stablelm", "opt"),
            *("gemma", "gemma2", "gemma3", "gemma4", "gemma4-moe", "gemma4-small", "vaultgemma", "cohere", "cwm"),
            *("glm", "glm4", "glm4-moe", "olmo", "olmo2", "olmo3", "flex-olmo", "smollm3", "seed-oss", "hyperclovax"),
            *("granite", "granite-moe", "granite-moe-shared", "granite-swa", "granite-moe-swa", "granite-hybrid"),
            *("granite-hybrid-dense", "falcon-h1", "falcon-h1-norm", "helium", "starcoder2", "exaone4", "exaone-moe"),
            *("ernie4-5", "arcee", "dots1", "nanochat", "hunyuan", "hunyuan-moe", "hy-v3", "solar-open", "afmoe"),
            *("gpt-j", "gpt-neox"),
        ),
        WIDE,
    ),
    # what vLLM takes, whatever is said (precisionctl/engines/vllm.py)
    "olmoe": WIDE | {"norm_topk_prob": False},
    "gpt-oss": WIDE | {"swiglu_limit": 7.0},
    "lfm2": {"hidden_size": 256, "tie_word_embeddings": True},
    "lfm2-moe": WIDE | {"tie_word_embeddings": True},
    "phimoe": WIDE | {"router_jitter_noise": 0.01, "lm_head_bias": False},
    "falcon": {"hidden_size": 256, "ffn_hidden_size": 1024},
    "falcon-40b": {"hidden_size": 256, "ffn_hidden_size": 1024},
    "axk1": _WIDE_LATENTS,
    "mamba2": {"intermediate_size": 128},  # it takes such a word, which is not the family's, for the width of mixers
    # 0.32 adds to a null, which transformers writes
    "mellum": WIDE | {"num_nextn_predict_layers": 0},
    "minicpm3": {"hidden_size": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
    # of its class' own word, `multi_query`, vLLM takes no notice
    "gpt-bigcode": WIDE | {"num_key_value_heads": 1},
    "gpt-bigcode-by-head": WIDE | {"num_key_value_heads": 4},
    # without groups, its router for CPUs asks for a number of them
    "deepseek-v2": _WIDE_LATENTS | {"n_group": 1, "topk_group": 1},
    "deepseek-v2-groups": _WIDE_LATENTS,
    "deepseek-v3": _WIDE_LATENTS,
    "glm4-moe-lite": _WIDE_LATENTS | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    # which passes over the bias by which experts are chosen, and that of GPUs does not: here all are
    "ernie4-5-moe": WIDE | {"moe_k": 8},
    # it has no more positions than the scaled context
    "ministral3": WIDE
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "phi3-long": {
        **{size: WIDE[size] for size in ("hidden_size", "intermediate_size")},
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 32,
            "long_factor": _LONG,
        },
    },
}
"""vLLM's kernels for CPUs compute the logits that we compute of what we wrote."""
