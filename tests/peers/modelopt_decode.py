"""Run with ModelOpt's Python: DIRECTORY OUT writes what its own tensors dequantise each weight of a directory to, in
FP32."""

import sys
from pathlib import Path

import torch
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor
from safetensors.torch import load_file, save_file

directory, out = sys.argv[1:]
stored = load_file(Path(directory) / "model.safetensors")
expected = {}
for name in [name for name, values in stored.items() if values.dtype == torch.float8_e4m3fn]:
    codes, scale = stored[name], stored[f"{name}_scale"]
    kind = MXFP8QTensor if scale.dtype == torch.uint8 else FP8QTensor
    blocks = {}
    if scale.dim() == 1 and scale.numel() > 1:
        scale = scale[:, None]
    elif scale.dim() == 4:  # [rows / 128, 1, columns / 128, 1]
        scale, blocks = scale[:, 0, :, 0], {-1: 128, -2: 128}
    tensor = kind(codes.shape, torch.float32, codes)
    expected[name] = tensor.dequantize(torch.float32, scale=scale, block_sizes=blocks).contiguous()
save_file(expected, out)
