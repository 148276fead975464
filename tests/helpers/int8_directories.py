"""Hugging Face directories in INT8 as compressed-tensors itself writes them, and what it decompresses them to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coded_directories
import torch
from coded_directories import of_module
from installed import judge
from torch import Tensor

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}

_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_FIXED = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}


@dataclass(frozen=True)
class Int8:
    """A spelling: the arguments of weights, those of inputs, and the dtype of scales."""

    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None
    format: str = "int-quantized"
    scales: torch.dtype = torch.bfloat16


def _weights(strategy: str, symmetric: bool = True, size: int | None = None) -> dict[str, Any]:
    return {"num_bits": 8, "type": "int", "strategy": strategy, "group_size": size, "symmetric": symmetric}


SPELLINGS: dict[str, Int8] = {
    "w8a8": Int8(_weights("channel"), {**_TOKENS, "symmetric": True}),
    "w8a8-fp32-scales": Int8(_weights("channel"), {**_TOKENS, "symmetric": True}, scales=torch.float32),
    "w8a8-zero-points": Int8(_weights("channel"), {**_TOKENS, "symmetric": False}),
    "w8a8-static": Int8(_weights("tensor"), {**_FIXED, "symmetric": True}),
    "w8a8-static-zero-points": Int8(_weights("channel"), {**_FIXED, "symmetric": False}, scales=torch.float16),
    "w8a16": Int8(_weights("channel"), None, "pack-quantized"),
    "w8a16-64": Int8(_weights("group", size=64), None, "pack-quantized"),
}
WITH_ZERO_POINTS = Int8(_weights("group", symmetric=False, size=64), None, "pack-quantized")
"""Of weights: their codes come back from FP32 alone."""


def make(
    directory: Path,
    spelled: Int8,
    family: str = "llama-3",
    quantized: Callable[[str], bool] = lambda name: True,
    **sizes: Any,
) -> dict[str, Tensor]:
    """Save a small model whose linears, as far as `quantized` says, are codes, every code among them. Returns what
    compressed-tensors makes of them, in the dtype of the scales."""
    compressor = judge("compressed_tensors.compressors").BaseCompressor.get_value_from_registry(spelled.format)
    scheme_of = judge("compressed_tensors.quantization").QuantizationScheme
    group = {"targets": ["Linear"], "weights": dict(spelled.weights), "input_activations": spelled.inputs}
    scheme = scheme_of.model_validate({**group, "format": spelled.format})
    generator = torch.Generator().manual_seed(1)

    def coded(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        parts = compressor.compress({"weight": weight, **_scales(weight, spelled, scheme)}, scheme)
        codes = parts["weight" if "weight" in parts else "weight_packed"].view(torch.uint8)
        every = torch.arange(256, dtype=torch.uint8)
        codes.view(-1)[: codes.numel() // 256 * 256] = every.repeat(codes.numel() // 256)
        if spelled.inputs and not spelled.inputs["dynamic"]:
            parts["input_scale"] = (torch.rand(1, generator=generator) * 0.02 + 0.01).to(spelled.scales)
            if not spelled.inputs["symmetric"]:
                parts["input_zero_point"] = torch.randint(-40, 60, (1,), generator=generator, dtype=torch.int8)
        return of_module(name, parts), compressor.decompress(parts, scheme)["weight"]

    said = {
        "quant_method": "compressed-tensors",
        "format": spelled.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": spelled.format}},
        "ignore": ["lm_head"],
    }
    return coded_directories.make(directory, family, said, coded, quantized, **SIZES | sizes)


def _scales(weight: Tensor, spelled: Int8, scheme: Any) -> dict[str, Tensor]:
    """Scales and zero points by compressed-tensors' own rule."""
    calculate = judge("compressed_tensors.quantization.utils").calculate_qparams
    strategy, size = spelled.weights["strategy"], spelled.weights["group_size"]
    groups = weight.float().reshape(1, -1) if strategy == "tensor" else weight.float()
    groups = groups.reshape(len(groups), -1, size or groups.shape[1])
    scale, zeros = calculate(groups.amin(-1), groups.amax(-1), scheme.weights)
    scale = scale.reshape(1) if strategy == "tensor" else scale
    zero = {} if spelled.weights["symmetric"] else {"weight_zero_point": zeros.to(torch.int8)}
    return {"weight_scale": scale.to(spelled.scales), **zero}
