"""Hugging Face directories in FP8, in every spelling that is read: random codes under random scales.

Random, so that no scale is what its codes' largest magnitude would give: whoever makes scales anew is found out. What
a code is worth is spelled out from its bits, and tensors are decoded without torch's FP8 dtypes.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import coded_directories
import numpy as np
import quark_configs
import torch
from installed import judge
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, PreTrainedModel

LAYOUTS = {  # exponent bits, mantissa bits, bias, bytes that are no number
    torch.float8_e4m3fn: (4, 3, 7, {0x7F, 0xFF}),
    torch.float8_e5m2: (5, 2, 15, {*range(0x7C, 0x80), *range(0xFC, 0x100)}),
    torch.float8_e4m3fnuz: (4, 3, 8, {0x80}),
    torch.float8_e5m2fnuz: (5, 2, 16, {0x80}),
}


def value_of(code: int, dtype: torch.dtype = torch.float8_e4m3fn) -> float:
    """What a byte is worth, from its bits."""
    exponent_bits, mantissa_bits, bias, _ = LAYOUTS[dtype]
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> mantissa_bits) & ((1 << exponent_bits) - 1), code & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


def decoded(codes: torch.Tensor, grid: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Element (i, j) is its code's worth times `grid[i // block[0], j // block[1]]`, one FP32 product."""
    worth = np.array([value_of(code, codes.dtype) for code in range(256)], np.float32)
    rows, columns = (np.arange(size) // each for size, each in zip(codes.shape, block, strict=True))
    return worth[codes.view(torch.uint8).numpy()] * grid[np.ix_(rows, columns)].astype(np.float32)


def _compressed(strategy: str, inputs: Mapping[str, Any] | None, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


_FP8 = {"quant_method": "fp8", "fmt": "e4m3"}
_BLOCKS = {**_FP8, "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}

Shape = Callable[[int, int], tuple[int, ...]]


def _grid(rows: int, columns: int) -> tuple[int, ...]:
    return rows, columns


@dataclass(frozen=True)
class Spelled:
    """`block` None in a place is all of it; `shape` is how a grid of so many rows and columns is stored."""

    config: Mapping[str, Any]
    block: tuple[int | None, int | None]
    scale: str = "weight_scale"
    shape: Shape = field(default=_grid)
    dtype: torch.dtype = torch.float32
    input: str | None = None


SPELLINGS: dict[str, Spelled] = {
    "fp8-block": Spelled(_BLOCKS, (128, 128), "weight_scale_inv"),
    "fp8-block-bf16": Spelled(_BLOCKS, (128, 128), "weight_scale_inv", dtype=torch.bfloat16),
    "fp8-ue8m0": Spelled({**_BLOCKS, "scale_fmt": "ue8m0"}, (128, 128), "weight_scale_inv", dtype=torch.float8_e8m0fnu),
    "fp8-tensor-transformers": Spelled(
        {**_FP8, "activation_scheme": "static", "weight_block_size": None},
        (None, None),
        "weight_scale_inv",
        lambda rows, columns: (),
        input="activation_scale",
    ),
    "fp8-tensor-vllm": Spelled(
        {**_FP8, "activation_scheme": "static"}, (None, None), shape=lambda rows, columns: (1,), input="input_scale"
    ),
    "fp8-tensor-dynamic": Spelled(
        {**_FP8, "activation_scheme": "dynamic", "weight_block_size": None}, (None, None), shape=lambda r, c: ()
    ),
    "compressed-tensor": Spelled(
        _compressed("tensor", _STATIC), (None, None), shape=lambda r, c: (1,), dtype=torch.bfloat16, input="input_scale"
    ),
    "compressed-channel": Spelled(_compressed("channel", _TOKENS), (1, None)),
    "compressed-block": Spelled(
        _compressed("block", {**_TOKENS, "strategy": "group", "group_size": 128}, block_structure=[128, 128]),
        (128, 128),
        dtype=torch.bfloat16,
    ),
    "compressed-weights-alone": Spelled(_compressed("channel", None), (1, None)),
    "compressed-mxfp8": Spelled(
        {**_compressed("group", None, group_size=32), "format": "mxfp8-quantized"}, (1, 32), dtype=torch.uint8
    ),
    "modelopt-tensor": Spelled(
        {"quant_method": "modelopt", "quant_algo": "FP8"}, (None, None), shape=lambda r, c: (), input="input_scale"
    ),
    "modelopt-channel": Spelled(
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, (1, None), shape=lambda r, c: (r,)
    ),
    "modelopt-block": Spelled(
        {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, (128, 128), shape=lambda r, c: (r, 1, c, 1)
    ),
    "mxfp8": Spelled(
        {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
        (1, 32),
        "weight_scale_inv",
        dtype=torch.uint8,
    ),
    "mxfp8-minimax": Spelled(
        {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]},
        (1, 32),
        "weight_scale_inv",
        dtype=torch.float8_e8m0fnu,
    ),
    "fbgemm": Spelled(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}, (1, None)
    ),
    "quark-tensor": Spelled(
        quark_configs.config(quark_configs.FP8, quark_configs.FP8),
        (None, None),
        shape=lambda r, c: (),
        dtype=torch.bfloat16,
        input="input_scale",
    ),
    "quark-channel": Spelled(
        quark_configs.config(quark_configs.CHANNELS, quark_configs.TOKENS), (1, None), shape=lambda r, c: (r,)
    ),
    "modelopt-mxfp8": Spelled({"quant_method": "modelopt", "quant_algo": "MXFP8"}, (1, 32), dtype=torch.uint8),
}

RAGGED = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 48}
"""A Llama of which no linear is a multiple of 128 both ways; of 32 and 16, all are."""

KINDS = {(said.config["quant_method"], said.block): name for name, said in SPELLINGS.items()}
"""A spelling of each `quant_method` and size of block."""


@dataclass(frozen=True)
class Made:
    """A weight as it was stored: codes, the grid in FP64, and its block in numbers."""

    codes: torch.Tensor
    grid: np.ndarray
    block: tuple[int, int]

    @cached_property
    def values(self) -> torch.Tensor:
        """FP32."""
        return torch.from_numpy(decoded(self.codes, self.grid, self.block))


def random_codes(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Any byte that is a number."""
    numbers = torch.tensor([code for code in range(256) if code not in LAYOUTS[dtype][3]], dtype=torch.uint8)
    return numbers[torch.randint(len(numbers), shape, generator=generator)].view(dtype)


def random_scales(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """About what a model's are: 2^-14 to 2^-8."""
    exponents = -14 + 6 * torch.rand(shape, generator=generator)
    if dtype == torch.uint8:
        return (exponents.round() + 127).to(torch.uint8)
    return exponents.exp2().to(dtype)


def make(
    directory: Path,
    spelling: str,
    family: str = "llama-3",
    *,
    seed: int = 1,
    codes: torch.dtype = torch.float8_e4m3fn,
    **sizes: Any,
) -> dict[str, Made]:
    """Save a small model whose linears are FP8. Returns each of them as stored."""
    spelled, generator = SPELLINGS[spelling], torch.Generator().manual_seed(seed)

    def coded(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], Made]:
        rows, columns = weight.shape
        block = (spelled.block[0] or rows, spelled.block[1] or columns)
        counts = (-(-rows // block[0]), -(-columns // block[1]))
        stored = {"weight": random_codes((rows, columns), generator, codes)}
        scales = random_scales(counts, generator, spelled.dtype)
        worth = scales.to(torch.float64) - 127 if spelled.dtype == torch.uint8 else scales.float().double()
        made = Made(stored["weight"], (worth.exp2() if spelled.dtype == torch.uint8 else worth).numpy(), block)
        stored[spelled.scale] = scales.reshape(spelled.shape(*counts))
        if spelled.input:
            stored[spelled.input] = random_scales(spelled.shape(1, 1), generator, spelled.dtype)
        return coded_directories.of_module(name, stored), made

    return coded_directories.make(directory, family, spelled.config, coded, **sizes)


def decoded_by_transformers(directory: Path, dequantizing: Any) -> PreTrainedModel:
    """transformers' model of a directory in FP32, which computes with what codes decode to: a quantization config,
    `dequantizing`, says so, where the directory's own spelling has one. Raises whatever it raises."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You passed `quantization_config`")
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, quantization_config=dequantizing
        )
    if isinstance(dequantizing, CompressedTensorsConfig):  # transformers 5.17 goes on rounding inputs to FP8
        model.apply(judge("compressed_tensors.quantization").disable_quantization)
    return model
