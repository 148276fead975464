"""Hugging Face directories of four-bit weights, in every spelling that is read, by a writer of its own.

Random codes under random scales that no amax would give. What they are worth is computed from a list of sixteen
numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coded_directories
import numpy as np
import quark_configs
import torch
from coded_directories import of_module
from fp8_directories import value_of
from torch import Tensor

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
INT4 = [float(code - 8) for code in range(16)]

SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 1}


def compressed(weights: Mapping[str, Any], layout: str, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "dynamic": False, **weights}, "format": layout}
    groups = {"group_0": {**group, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}


def _fp4(strategy: str, size: int) -> dict[str, Any]:
    return {"type": "float", "strategy": strategy, "group_size": size, "symmetric": True}


def _int(size: int | None, symmetric: bool = True) -> dict[str, Any]:
    strategy = "group" if size else "channel"
    return {"type": "int", "strategy": strategy, "group_size": size, "symmetric": symmetric, "actorder": None}


NVFP4_INPUTS = {**_fp4("tensor_group", 16), "num_bits": 4, "dynamic": "local"}


@dataclass(frozen=True)
class FourBits:
    """A spelling: `words` is the dtype of codes' words, `suffix` of their tensor's name. `group` None is a row."""

    config: Mapping[str, Any]
    group: int | None
    numbers: list[float] = field(default_factory=lambda: E2M1)
    words: torch.dtype = torch.uint8
    suffix: str = "_packed"
    scales: torch.dtype = torch.uint8
    scale: str = "weight_scale"
    divisor: str | None = None
    multiplier: str | None = None
    input: str | None = None
    zero_points: bool = False


SPELLINGS: dict[str, FourBits] = {
    "ct-nvfp4": FourBits(
        compressed(_fp4("tensor_group", 16), "nvfp4-pack-quantized", NVFP4_INPUTS),
        16,
        scales=torch.float8_e4m3fn,
        divisor="weight_global_scale",
        input="input_global_scale",
    ),
    "ct-nvfp4a16": FourBits(
        compressed(_fp4("tensor_group", 16), "nvfp4-pack-quantized"),
        16,
        scales=torch.float8_e4m3fn,
        divisor="weight_global_scale",
    ),
    "ct-mxfp4": FourBits(compressed(_fp4("group", 32), "mxfp4-pack-quantized"), 32),
    "ct-int4-32": FourBits(compressed(_int(32), "pack-quantized"), 32, INT4, torch.int32, scales=torch.bfloat16),
    "ct-int4-128": FourBits(compressed(_int(128), "pack-quantized"), 128, INT4, torch.int32, scales=torch.bfloat16),
    "ct-int4-channel": FourBits(
        compressed(_int(None), "pack-quantized"), None, INT4, torch.int32, scales=torch.bfloat16
    ),
    "ct-int4-zero-points": FourBits(
        compressed(_int(64, symmetric=False), "pack-quantized"),
        64,
        INT4,
        torch.int32,
        scales=torch.bfloat16,
        zero_points=True,
    ),
    "ct-int4-128-zero-points": FourBits(
        compressed(_int(128, symmetric=False), "pack-quantized"),
        128,
        INT4,
        torch.int32,
        scales=torch.bfloat16,
        zero_points=True,
    ),
    "ct-int4-channel-zero-points": FourBits(
        compressed(_int(None, symmetric=False), "pack-quantized"),
        None,
        INT4,
        torch.int32,
        scales=torch.bfloat16,
        zero_points=True,
    ),
    "modelopt-nvfp4": FourBits(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        16,
        suffix="",
        scales=torch.float8_e4m3fn,
        multiplier="weight_scale_2",
        input="input_scale",
    ),
    "modelopt-nvfp4a16": FourBits(
        {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"]},
        16,
        suffix="",
        scales=torch.float8_e4m3fn,
        multiplier="weight_scale_2",
    ),
    "modelopt-mxfp4": FourBits({"quant_method": "modelopt", "quant_algo": "mxfp4"}, 32, suffix=""),
    "quark-mxfp4": FourBits(quark_configs.config(quark_configs.MXFP4, quark_configs.MXFP4_INPUTS), 32, suffix=""),
    "fp8-fp4-experts": FourBits(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        32,
        words=torch.int8,
        suffix="",
        scales=torch.float8_e8m0fnu,
        scale="weight_scale_inv",
    ),
}


def packed(codes: np.ndarray, words: torch.dtype) -> Tensor:
    """Codes `[rows, columns]` in words along each row, the first in the lowest bits."""
    each = 8 if words == torch.int32 else 2
    padded = np.pad(codes.astype(np.int64), ((0, 0), (0, -codes.shape[1] % each)))
    found = (padded.reshape(len(codes), -1, each) << 4 * np.arange(each)).sum(-1)
    bits = 8 * words.itemsize
    if words.is_signed:
        found = np.where(found >= 1 << bits - 1, found - (1 << bits), found)
    return torch.from_numpy(found).to(words)


def worth(scale: Tensor) -> np.ndarray:
    """What stored scales are, FP32."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return np.exp2(scale.view(torch.uint8).numpy().astype(np.float32) - np.float32(127))
    if scale.dtype == torch.float8_e4m3fn:
        flat = [value_of(int(byte)) for byte in scale.view(torch.uint8).reshape(-1)]
        return np.array(flat, dtype=np.float32).reshape(tuple(scale.shape))
    return scale.float().numpy()


def coded(shape: tuple[int, int], spelled: FourBits, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a weight, by the end of their names, and its values, FP32."""
    rows, columns = shape
    group = spelled.group or columns
    codes = torch.randint(16, shape, generator=generator).numpy()
    grid = (rows, columns // group)
    if spelled.scales == torch.float8_e4m3fn:
        scale = torch.randint(1, 0x7F, grid, generator=generator, dtype=torch.uint8).view(spelled.scales)
    elif spelled.scales.itemsize == 1:
        scale = torch.randint(110, 120, grid, generator=generator, dtype=torch.uint8).view(spelled.scales)
    else:
        scale = (torch.rand(grid, generator=generator) * 0.01 + 0.001).to(spelled.scales)
    stored = {f"weight{spelled.suffix}": packed(codes, spelled.words), spelled.scale: scale}
    multipliers, zeros = worth(scale), np.zeros(grid, np.float32)
    whole = float(torch.rand((), generator=generator))
    if spelled.divisor:
        stored[spelled.divisor] = torch.tensor([3000 + 9000 * whole])
        multipliers = multipliers / stored[spelled.divisor].numpy()
    if spelled.multiplier:
        stored[spelled.multiplier] = torch.tensor(whole / 4000)
        multipliers = multipliers * stored[spelled.multiplier].numpy()
    if spelled.input:
        shape_of_one = () if spelled.multiplier else (1,)
        stored[spelled.input] = torch.rand(shape_of_one, generator=generator) + 0.1
    if spelled.zero_points:
        points = torch.randint(16, grid, generator=generator).numpy()
        zeros = points.astype(np.float32) - 8
        stored["weight_zero_point"] = packed(points.T, torch.int32).t().contiguous()
    if spelled.words == torch.int32:
        stored["weight_shape"] = torch.tensor(shape)
    numbers = np.array(spelled.numbers, np.float32)[codes]
    values = (numbers - zeros.repeat(group, axis=1)) * multipliers.repeat(group, axis=1)
    return stored, torch.from_numpy(values)


def make(
    directory: Path,
    spelling: str,
    family: str = "llama-3",
    quantized: Callable[[str], bool] = lambda name: True,
    **sizes: Any,
) -> dict[str, Tensor]:
    """Save a small model whose linears, as far as `quantized` says, are codes. Returns what they decode to, FP32."""
    spelled, generator = SPELLINGS[spelling], torch.Generator().manual_seed(1)

    def stored(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, values = coded((weight.shape[0], weight.shape[1]), spelled, generator)
        return of_module(name, tensors), values

    return coded_directories.make(directory, family, spelled.config, stored, quantized, **SIZES | sizes)
