"""Models small enough to make on the spot, of real architectures, by transformers itself."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

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
    "mistral": {"sliding_window": 8},
}
"""What each named family is made of, beside SIZES."""


def make(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A randomly initialised model whose biases and norms are random too, so that a mix-up shows."""
    torch.manual_seed(seed)
    settings = SIZES | FAMILIES[family] | changes
    if family == "mistral":
        model: PreTrainedModel = MistralForCausalLM(MistralConfig(**settings))
    else:
        model = LlamaForCausalLM(LlamaConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).eval()


def save(directory: Path, family: str = "llama-3", *, max_shard_size: str = "5GB", **settings: Any) -> PreTrainedModel:
    """Make a model and let transformers save it."""
    model = make(family, **settings)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model
