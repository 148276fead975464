"""Run with ModelOpt's Python: DIRECTORY OUT writes what its own tensors dequantize each weight of a directory to, in
FP32."""

import sys
from pathlib import Path

import torch
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import load_file, save_file

directory, out = sys.argv[1:]
stored = load_file(Path(directory) / "model.safetensors")
expected = {}
for name in [name for name, values in stored.items() if values.dtype == torch.uint8 and name.endswith("weight")]:
    packed, scale, double = stored[name], stored[f"{name}_scale"], stored.get(f"{name}_scale_2")
    kind, group = (MXFP4QTensor, 32) if double is None else (NVFP4QTensor, 16)
    tensor = kind((len(packed), 2 * packed.shape[1]), torch.bfloat16, packed)
    expected[name] = tensor.dequantize(scale=scale, double_scale=double, block_sizes={-1: group}).contiguous()
for name in [name for name, values in stored.items() if values.dtype == torch.float8_e4m3fn]:
    if name.endswith("_scale"):  # NVFP4's
        continue
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
