"""What published Gemma 3n and Gemma 4 have in layers that share keys and values: projections that nothing reads."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

UNUSED = ("k_proj", "v_proj", "k_norm")


def with_unused(directory: Path, first: int, body: str = "model") -> dict[str, Tensor]:
    """Give these to the layers of a saved model from the `first` on, of the shapes that the first layers have in the
    same order; its tensors."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    layers = 1 + max(int(name.split(".layers.")[1].split(".")[0]) for name in tensors if f"{body}.layers." in name)
    for layer in range(first, layers):
        for name in UNUSED:
            like = tensors[f"{body}.layers.{layer - first}.self_attn.{name}.weight"]
            tensors[f"{body}.layers.{layer}.self_attn.{name}.weight"] = torch.randn(like.shape).to(like.dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors
