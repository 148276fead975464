"""Inkling 2's low-precision releases, as far as transformers says what is in them: the experts of a layer in two
tensors, `w13_weight` and `w2_weight`, as MXFP8 (Small) or, by layer, NVFP4 and MXFP8 (Mini). Random codes under random
scales; what they are worth is computed here, in FP32, by tables that are written out."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
MXFP8_CONFIG = {
    "quant_method": "mxfp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [1, 32],
    "scale_fmt": "ue8m0",
    "modules_to_not_convert": ["model.llm.embed", "model.llm.unembed"],
}
DENOMINATOR = 2688.0  # 448 * 6


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if code & 128 else size


E4M3 = np.array([e4m3(code) if code & 127 != 127 else np.nan for code in range(256)], np.float32)
NUMBERS = np.array([code for code in range(256) if code & 127 != 127], np.uint8)
"""The codes of E4M3 that are numbers."""


def mxfp8(name: str, shape: tuple[int, ...], random: np.random.Generator) -> tuple[dict[str, Tensor], np.ndarray]:
    """The tensors of a stack of experts, and its values in FP32."""
    codes = random.choice(NUMBERS, shape)
    scale = random.integers(100, 130, (*shape[:-1], shape[-1] // 32), np.uint8)
    values = E4M3[codes].reshape(*scale.shape, 32) * np.exp2(scale.astype(np.float32) - 127)[..., None]
    coded = {name: torch.from_numpy(codes).view(torch.float8_e4m3fn), f"{name}_scale": torch.from_numpy(scale)}
    return coded, values.reshape(shape)


def nvfp4(name: str, shape: tuple[int, ...], random: np.random.Generator) -> tuple[dict[str, Tensor], np.ndarray]:
    """The same. Each step rounds to FP32, in transformers' order."""
    codes = random.integers(0, 16, shape, np.uint8)
    scale = random.choice(NUMBERS[NUMBERS < 128], (*shape[:-1], shape[-1] // 16))
    amax = random.uniform(0.5, 4, shape[0]).astype(np.float32)
    values = E2M1[codes].reshape(*scale.shape, 16) * E4M3[scale][..., None]
    values = values * (amax / np.float32(DENOMINATOR))[:, None, None, None]
    coded = {
        name: torch.from_numpy(codes[..., ::2] | codes[..., 1::2] << 4),
        f"{name}_scale": torch.from_numpy(scale).view(torch.float8_e4m3fn),
        f"{name}_amax": torch.from_numpy(amax),
        f"{name}_outer_scale_denominator": torch.tensor(DENOMINATOR),
    }
    return coded, values.reshape(shape)


def code(directory: Path) -> dict[str, np.ndarray]:
    """Put random codes in the place of the experts of a directory in BF16. Returns their values in FP32."""
    random = np.random.default_rng(0)
    config = json.loads((directory / "config.json").read_text())
    tensors, values = load_file(directory / "model.safetensors"), {}
    for name in sorted(name for name in tensors if ".mlp.experts." in name):
        in_nvfp4 = config["model_type"] == "inkling2_loop" and ".layers.0." not in name
        coded, values[name] = (nvfp4 if in_nvfp4 else mxfp8)(name, tuple(tensors[name].shape), random)
        tensors |= coded
    save(directory, config if config["model_type"] == "inkling2_loop" else quantized(config), tensors)
    return values


def quantized(config: Mapping[str, object]) -> dict[str, object]:
    return {**config, "quantization_config": MXFP8_CONFIG}


def save(directory: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), directory / "model.safetensors", {"format": "pt"})


def make(directory: Path, model_type: str) -> dict[str, np.ndarray]:
    """Two layers with no more tensors than it takes. Returns the experts' values in FP32."""
    directory.mkdir()
    tensors = {"model.llm.embed.weight": torch.randn(16, 64).bfloat16()}
    for layer in range(2):
        name = f"model.llm.layers.{layer}"
        tensors[f"{name}.attn.wq_du.weight"] = torch.randn(64, 64).bfloat16()
        tensors[f"{name}.mlp.gate.weight"] = torch.randn(3, 64)
        tensors[f"{name}.mlp.experts.w13_weight"] = torch.zeros(3, 64, 64).bfloat16()
        tensors[f"{name}.mlp.experts.w2_weight"] = torch.zeros(3, 64, 32).bfloat16()
    save(directory, {"model_type": model_type, "architectures": ["Inkling2ForCausalLM"], "dtype": "bfloat16"}, tensors)
    return code(directory)
