"""Models small enough to make on the spot, of real architectures, by transformers itself."""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
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
}
"""What each named family is made of, beside SIZES: settings of its config, and `model_type` where that is not Llama."""


def make(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A randomly initialised model whose biases and norms are random too, so that a mix-up shows."""
    torch.manual_seed(seed)
    settings = {"model_type": "llama"} | SIZES | FAMILIES[family] | changes
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if re.search(r"norm|ln_|bias$|sinks$", name):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return model.to(dtype).eval()


def save(directory: Path, family: str = "llama-3", *, max_shard_size: str = "5GB", **settings: Any) -> PreTrainedModel:
    """Make a model and let transformers save it."""
    model = make(family, **settings)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model
