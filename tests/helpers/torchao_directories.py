"""Hugging Face directories as transformers writes them with torchao, by a slow writer of its own.

Random codes under random scales; what they are worth is computed in FP64 and rounded once. That is what FP32 gives, as
codes, zero points and scales have few bits.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coded_directories
import torch
from coded_directories import SIZES, of_module
from safetensors.torch import load_file, save_file
from torch import Tensor

SPELLINGS = {
    "float8-row": ("Float8Tensor", (1, None)),
    "float8-tensor": ("Float8Tensor", (None, None)),
    "float8-block": ("Float8Tensor", (16, 32)),
    "int8-row": ("Int8Tensor", (1, None)),
    "intx-group": ("IntxUnpackedToInt8Tensor", (1, 32)),
    "int4-group": ("Int4Tensor", (1, 32)),
}
"""torchao's class, and the rows and columns that share a scale; None: all of them."""


def coded(
    shape: tuple[int, ...], spelling: str, generator: torch.Generator
) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
    """What is stored of a weight `[out, in]`, what the metadata says of it, and its values, BF16."""
    kind, block = SPELLINGS[spelling]
    rows, columns = (size or whole for size, whole in zip(block, shape, strict=True))
    grid = (shape[0] // rows, shape[1] // columns)
    scale = (torch.rand(grid, generator=generator) * 0.01 + 0.001).bfloat16().float()
    if kind == "Int4Tensor":
        return four_bits(shape, columns, scale.t().contiguous().bfloat16(), generator)
    stored = {"scale": scale}
    zero = torch.zeros(grid, dtype=torch.int8)
    if kind == "Float8Tensor":
        stored["qdata"] = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    else:
        stored["qdata"] = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
        stored["zero_point"] = zero = torch.randint(-128, 128, grid, generator=generator).to(torch.int8)
    every = [each.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1) for each in (zero, scale)]
    values = (stored["qdata"].double() - every[0]) * every[1]
    data = {"block_size": [rows, columns], "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}
    return stored, {"_type": kind, "_data": data, "_tensor_data_names": list(stored)}, values.float().bfloat16()


def four_bits(
    shape: tuple[int, ...], columns: int, scale: Tensor, generator: torch.Generator
) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
    """`coded` of an Int4Tensor with these scales, `[in / columns, out]`."""
    codes = torch.randint(-8, 8, shape, generator=generator)
    zero = (torch.randint(-8, 8, scale.shape, generator=generator) * 0.0078125).bfloat16()
    every = [each.double().t().repeat_interleave(columns, 1) for each in (scale, zero)]
    packed = [[(row[at] & 15) | (row[at + 1] & 15) << 4 for at in range(0, len(row), 2)] for row in codes.tolist()]
    stored = {"qdata": torch.tensor(packed, dtype=torch.uint8).view(torch.int8), "scale": scale, "zero_point": zero}
    data = {"block_size": [1, columns], "shape": [*shape], "activation_dtype": None}
    said = {"_type": "Int4Tensor", "_data": data, "_tensor_data_names": list(stored)}
    return stored, said, (codes * every[0] + every[1]).float().bfloat16()


def make(
    directory: Path,
    spelling: str,
    family: str = "llama-3",
    quantized: Callable[[str], bool] = lambda name: True,
    **sizes: Any,
) -> dict[str, Tensor]:
    """Save a small model whose linears, as far as `quantized` says, are codes. Returns what they decode to, BF16."""
    generator, said = torch.Generator().manual_seed(1), dict[str, Any]()

    def parts(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, said[name], values = coded(tuple(weight.shape), spelling, generator)
        return of_module(name, {f"_weight_{kind}": each for kind, each in stored.items()}), values

    quantization = {"quant_method": "torchao", "quant_type": {"default": {"_type": "SomeConfig", "_data": {}}}}
    found = coded_directories.make(directory, family, quantization, parts, quantized, **SIZES | sizes)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    said |= {name: {"_type": "Tensor"} for name in tensors if "._weight_" not in name}
    metadata = {name: json.dumps(each) for name, each in said.items()}
    save_file(tensors, file, metadata | {"format": "pt", "tensor_names": json.dumps(list(metadata))})
    return found
