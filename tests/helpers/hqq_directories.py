"""Hugging Face directories with HQQ's modules in safetensors, by a slow writer of its own.

Random codes under random scales and zero points; what they are worth is computed as hqq computes, in its dtype.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coded_directories
import torch
from coded_directories import SIZES, of_module
from torch import Tensor


@dataclass(frozen=True)
class Grouped:
    """The bits of codes, the axis along which groups lie, their size, and the dtype that is computed in."""

    bits: int
    axis: int
    group: int
    dtype: torch.dtype = torch.bfloat16


SPELLINGS = {
    "hqq-4": Grouped(4, 1, 64),
    "hqq-3-columns": Grouped(3, 0, 32),
    "hqq-2-float16": Grouped(2, 1, 16, torch.float16),
    "hqq-8-float32": Grouped(8, 0, 64, torch.float32),
    "hqq-1": Grouped(1, 1, 8),
}
PACKINGS = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}


def letters(text: str) -> Tensor:
    return torch.tensor([*text.encode()], dtype=torch.uint8)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Rows of codes that are as far apart as a word has rows, in one row of words."""
    count = 10 if bits == 3 else 8 // bits
    rows = -(-len(codes) // count)
    words = torch.zeros(rows, codes.shape[1], dtype=torch.int32)
    for row, held in enumerate(codes):
        words[row % rows] |= held.int() << bits * (count - 1 - row // rows)
    return words if bits == 3 else words.to(torch.uint8)


def coded(
    name: str, shape: tuple[int, ...], said: Grouped, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a weight `[out, in]` by name, and its values, BF16."""
    groups = shape[0] * shape[1] // said.group
    codes = torch.randint(1 << said.bits, (groups, said.group), generator=generator)
    if not said.axis:
        codes = codes.t().contiguous()
    along = (groups, 1) if said.axis else (1, groups)
    scale = (torch.rand(along, generator=generator) * 0.05 + 0.001).to(said.dtype)
    zero = (torch.rand(along, generator=generator) * (1 << said.bits)).to(said.dtype)
    values = ((codes.to(said.dtype) - zero) * scale).reshape(shape).bfloat16()
    numbers = {"nbits": said.bits, "group_size": said.group, "axis": said.axis}
    switches = {"channel_wise": 1, "stores_quant_config": 1, "encoded_state_dict": 1, "optimize": 1}
    switches |= dict.fromkeys(("view_as_float", "quant_scale", "quant_zero", "offload_meta", "round_zero"), 0)
    stored = {
        "W_q": packed(codes, said.bits),
        "scale": scale,
        "zero": zero,
        "shape": torch.tensor(shape),
        "packing": letters(PACKINGS[said.bits]),
        "unpack_view_dtype": letters("torch.int32" if said.bits == 3 else "torch.uint8"),
        "compute_dtype": letters(str(said.dtype)),
        **{key: torch.tensor(number, dtype=torch.int32) for key, number in numbers.items()},
        **{key: torch.tensor(number, dtype=torch.uint8) for key, number in switches.items()},
    }
    return of_module(name, stored), values


def make(directory: Path, spelling: str, family: str = "llama-3", **sizes: Any) -> dict[str, Tensor]:
    """Save a small model whose linears are codes. Returns what they decode to, BF16."""
    generator = torch.Generator().manual_seed(1)
    return coded_directories.make(
        directory,
        family,
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}, "skip_modules": ["lm_head"]},
        lambda name, weight: coded(name, tuple(weight.shape), SPELLINGS[spelling], generator),
        **SIZES | sizes,
    )
