"""Models small enough to make on the spot, of real architectures, by transformers itself."""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

SIZES: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
"""Of config.json: the defaults are tokens beyond so small a vocabulary."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

YARN_ROPE = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
}

_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
_EXPERTS = {
    "num_hidden_layers": 3,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_DEEPSEEK = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama-2": {"num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "llama-3": {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-attention-bias": {"attention_bias": True},
    "llama-all-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-head-dim": {"head_dim": 32},
    "yi": {"num_key_value_heads": 1, "rope_theta": 5000000.0},
    "mistral": {"model_type": "mistral", "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": 8},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "qwen3-moe-scores-of-all": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
    },
    "phi3": {"model_type": "phi3"},
    "phi3-long": {
        "model_type": "phi3",
        "rope_parameters": LONG_ROPE,
        "original_max_position_embeddings": 32,
        "sliding_window": 8,
    },
    "nemotron": {"model_type": "nemotron", "head_dim": 16},
    "nemotron-biases": {"model_type": "nemotron", "head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "gpt2": {"model_type": "gpt2", **_GPT},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "sliding_window": 8,
        "num_hidden_layers": 3,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "num_hidden_layers": 7,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "swiglu_limit": 0.5,
        "rope_parameters": YARN_ROPE | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    },
    "deepseek-v2": {"model_type": "deepseek_v2", **_DEEPSEEK, "q_lora_rank": None},
    "deepseek-v2-groups": {
        "model_type": "deepseek_v2",
        **_DEEPSEEK,
        "q_lora_rank": 24,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **_DEEPSEEK,
        "q_lora_rank": 24,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.8},
    },
    "glm4-moe": {"model_type": "glm4_moe", **_EXPERTS, "head_dim": 32, "use_qk_norm": True, "attention_bias": True},
}
"""What each named family is made of, beside SIZES: settings of its config, and `model_type` where that is not Llama."""

PARALLEL_RESIDUAL: dict[str, dict[str, Any]] = {
    "gpt-j": {"model_type": "gptj", **_GPT, "rotary_dim": 8},
    "gpt-neox": {"model_type": "gpt_neox", "num_key_value_heads": 4},
}
"""Families that Megatron-Core does not have."""

ALSO = {"kimi_k2": "deepseek_v3"}
"""Names of families whose class has another one; transformers does not know these."""


def make(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A randomly initialised model whose biases and norms are random too, so that a mix-up shows."""
    torch.manual_seed(seed)
    known = FAMILIES | PARALLEL_RESIDUAL
    settings = {"model_type": "llama"} | SIZES | NO_TOKENS | known[family] | changes
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if re.search(r"norm|ln_|bias$|sinks$", name):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return as_its_config_says(model).to(dtype).eval()


def as_its_config_says(model: PreTrainedModel) -> PreTrainedModel:
    """transformers 5.17 clamps gpt-oss' experts at 7 whatever is written, and where attention is not eager leaves Gemma
    2's caps out."""
    model.set_attn_implementation("eager")
    for experts in model.modules():
        if isinstance(experts, GptOssExperts):
            experts.limit = model.config.swiglu_limit
    return model


def save(directory: Path, family: str = "llama-3", *, max_shard_size: str = "5GB", **settings: Any) -> PreTrainedModel:
    """Make a model and let transformers save it."""
    model = make(family, **settings)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model
