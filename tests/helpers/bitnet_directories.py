"""BitNet directories, packed by transformers' own `pack_weights`; its modules say what they are worth."""

import warnings
from pathlib import Path
from typing import Any

import coded_directories
import torch
from coded_directories import SIZES
from torch import Tensor

with warnings.catch_warnings():  # of the compiler, which it asks for as it is imported
    warnings.simplefilter("ignore")
    from transformers.integrations.bitnet import AutoBitLinear, BitLinear, pack_weights

SPELLINGS = ("bitlinear", "autobitlinear", "autobitlinear-saved-again")
"""The `linear_class`; what transformers saves of one that it has loaded is no longer packed."""


def worth(module: BitLinear | AutoBitLinear) -> Tensor:
    """The weight that a module computes with: its outputs of one-hot inputs, which it rounds to themselves."""
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        return module(torch.eye(module.in_features)).t().contiguous().bfloat16()


def coded(
    name: str, shape: tuple[int, ...], spelling: str, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a weight `[out, in]` by name, and its values, BF16. Scales are BF16, so that a module's arithmetic
    in FP32 is exact but for the last division."""
    out, inputs = shape
    ternary = torch.randint(-1, 2, shape, generator=generator)
    scale = (torch.rand(1, generator=generator) + 0.1).bfloat16()
    packed = pack_weights(ternary.clone())
    if spelling == "bitlinear":
        module: BitLinear | AutoBitLinear = BitLinear(inputs, out, bias=False, dtype=torch.float32)
        module.weight.copy_(packed)
    else:
        module = AutoBitLinear(inputs, out, bias=False, dtype=torch.float32).requires_grad_(False)
        module.weight.copy_(ternary)
    module.weight_scale.copy_(scale)
    stored = ternary.bfloat16() if spelling.endswith("again") else packed
    return {name: stored, f"{name}_scale": scale}, worth(module)


def make(directory: Path, spelling: str, family: str = "llama-3", **sizes: Any) -> dict[str, Tensor]:
    """Save a small model whose linears are codes. Returns what they are worth, BF16."""
    generator = torch.Generator().manual_seed(1)
    said = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}
    if spelling != "bitlinear":
        said |= {"linear_class": "autobitlinear", "quantization_mode": "offline"}

    return coded_directories.make(
        directory,
        family,
        said,
        lambda name, weight: coded(name, tuple(weight.shape), spelling, generator),
        **SIZES | sizes,
    )
