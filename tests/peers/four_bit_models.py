"""Small models for other programs to quantize to four bits, whose sizes any group divides."""

from pathlib import Path

import pico
import torch
from safetensors.torch import load_file, save_file

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
FAMILIES = {"llama": "llama-3", "qwen3-moe": "qwen3-moe"}
SPECIAL = "model.layers.0.self_attn.k_proj.weight"
"""A weight `[16, 128]` that has groups of zeros, of zeros of both signs, and of numbers that are all but zero, and one
in which many a number is in the middle between two codes."""


def save(folder: Path, family: str) -> None:
    """Write a random model in BF16."""
    pico.save(folder, FAMILIES[family], dtype=torch.bfloat16, **SIZES)
    stored = load_file(folder / "model.safetensors")
    weight = stored[SPECIAL]
    assert weight.shape == (16, 128)
    weight[1, :32] = 0
    weight[2, :32] = torch.tensor([0.0, -0.0]).repeat(16)
    weight[3, :32] *= 1e-7
    weight[4] = torch.tensor([0.25, -0.75, 1.25, -1.75, 2.5, -3.5, 5, -6]).repeat(16) / 64
    weight[5] = torch.tensor([0.25, -0.75, 1.25, -1.75, 2.5, -3.5, 5, -7.5]).repeat(16) / 64
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
