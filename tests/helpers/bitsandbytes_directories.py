"""Hugging Face directories as transformers writes them with bitsandbytes, by a slow writer of its own.

Random codes under random scales; what they are worth is computed block by block, in FP32 as bitsandbytes computes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coded_directories
import torch
from bitsandbytes_tables import TABLES
from coded_directories import SIZES
from torch import Tensor

SPELLINGS = ("nf4", "nf4-nested", "fp4-nested-float32", "nf4-float16", "nf4-in-bfloat16", "int8")
"""The table; whether absmaxes are codes too; the dtype that values are rounded to first, BF16 if there is none."""


def quant_state(said: dict[str, Any]) -> Tensor:
    return torch.tensor([*json.dumps(said).encode()], dtype=torch.uint8)


def coded(
    name: str, shape: tuple[int, ...], spelling: str, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a weight `[out, in]` by name, and its values, BF16."""
    out, inputs = shape
    if spelling == "int8":
        codes = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
        scales = torch.rand(out, generator=generator) * 0.1
        values = torch.stack([row.float() * scale * (1 / 127) for row, scale in zip(codes, scales, strict=True)])
        module = name.removesuffix("weight")
        order = torch.tensor(0, dtype=torch.uint8)
        return {name: codes, f"{module}SCB": scales, f"{module}weight_format": order}, values.bfloat16()
    kind, dtype = spelling.partition("-")[0], "bfloat16"
    for each in ("float16", "float32"):
        dtype = each if spelling.endswith(each) else dtype
    table = torch.tensor(TABLES[kind])
    codes = torch.randint(16, (out * inputs,), generator=generator)
    blocks = -(-len(codes) // 64)
    said = {"quant_type": kind, "blocksize": 64, "dtype": dtype, "shape": [*shape]}
    stored = {f"{name}.quant_map": table}
    if "nested" in spelling:
        said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.03125}
        inner = torch.randint(256, (blocks,), generator=generator)
        outer = torch.rand(-(-blocks // 256), generator=generator) * 0.02 + 0.01
        numbers = torch.linspace(-1, 1, 256)
        scales = torch.stack([numbers[code] * outer[at // 256] + 0.03125 for at, code in enumerate(inner)])
        stored |= {f"{name}.absmax": inner.to(torch.uint8), f"{name}.nested_absmax": outer}
        stored |= {f"{name}.nested_quant_map": numbers}
    else:
        scales = torch.rand(blocks, generator=generator) * 0.05
        stored |= {f"{name}.absmax": scales}
    values = torch.cat([table[codes[64 * at : 64 * at + 64]] * scale for at, scale in enumerate(scales)])
    packed = (codes[0::2] * 16 + codes[1::2]).to(torch.uint8)
    stored[name] = (packed.view(torch.bfloat16) if "in-bfloat16" in spelling else packed).unsqueeze(1)
    stored[f"{name}.quant_state.bitsandbytes__{kind}"] = quant_state(said)
    return stored, values.to(getattr(torch, dtype)).bfloat16().view(shape)


def make(
    directory: Path,
    spelling: str,
    family: str = "llama-3",
    quantized: Callable[[str], bool] = lambda name: True,
    **sizes: Any,
) -> dict[str, Tensor]:
    """Save a small model whose linears, as far as `quantized` says, are codes. Returns what they decode to, BF16."""
    generator, of_8_bits = torch.Generator().manual_seed(1), spelling == "int8"
    return coded_directories.make(
        directory,
        family,
        {"quant_method": "bitsandbytes", "load_in_4bit": not of_8_bits, "load_in_8bit": of_8_bits},
        lambda name, weight: coded(name, tuple(weight.shape), spelling, generator),
        quantized,
        **SIZES | sizes,
    )
