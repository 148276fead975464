"""What all writers of small Hugging Face directories of codes do alike. What a method stores of a weight is in its own
file."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pico
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZES = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32, "num_hidden_layers": 1}

Worth = TypeVar("Worth")
"""What a writer says of a weight: the values that its codes decode to, or more."""


def is_quantized(name: str, values: Tensor) -> bool:
    return (
        values.dim() == 2 and name.endswith(".weight") and not any(part in name for part in ("embed", "head", "gate."))
    )


def make(
    directory: Path,
    family: str,
    said: Mapping[str, Any],
    coded: Callable[[str, Tensor], tuple[Mapping[str, Tensor], Worth]],
    quantized: Callable[[str], bool] = lambda name: True,
    **sizes: Any,
) -> dict[str, Worth]:
    """Save a small model whose linears, as far as `quantized` says, are codes, under this `quantization_config`.
    `coded` has a linear's name and values, `[out, in]` in BF16, and returns the tensors that are stored of it, by name,
    and what it is worth. Returns the latter of each."""
    pico.save(directory, family, dtype=torch.bfloat16, **sizes)
    file, worth = directory / "model.safetensors", dict[str, Worth]()
    stored = load_file(file)
    for name, values in list(stored.items()):
        if is_quantized(name, values) and quantized(name):
            del stored[name]
            tensors, worth[name] = coded(name, values)
            stored |= tensors
    save_file({name: each.contiguous() for name, each in stored.items()}, file, metadata={"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": dict(said)}))
    return worth


def of_module(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors beside a weight, or in its place, by the names that they have in its module."""
    return {f"{name.removesuffix('weight')}{end}": each for end, each in tensors.items()}
