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
