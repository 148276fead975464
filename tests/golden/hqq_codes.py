"""Writes `hqq_codes.safetensors`: weights as HQQ's modules store them, and as `<case>.decoded` what HQQ makes of them.

    PYTHONPATH=HQQ python hqq_codes.py     where hqq, termcolor and einops are installed; PyTorch, on a CPU

By hqq 0.2.8.post1 (its sources, installed with DISABLE_CUDA=1).
"""

from pathlib import Path

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from safetensors.torch import save_file


def main() -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 64) * torch.rand(48, 1)
    stored = {}
    for bits in (8, 6, 5, 4, 3, 2, 1.58, 1):
        for axis, dtype in ((1, torch.bfloat16), (0, torch.float16), *([(1, torch.float32)] if bits == 4 else [])):
            case = f"bits-{bits}-axis-{axis}-{str(dtype).removeprefix('torch.')}".replace(".", "_")
            linear = torch.nn.Linear(64, 48, bias=False)
            linear.weight.data = weight.to(dtype)
            config = BaseQuantizeConfig(nbits=bits, group_size=16, axis=axis)
            module = HQQLinear(linear, config, compute_dtype=dtype, device="cpu")
            stored |= {f"{case}.{name}": each for name, each in module.state_dict().items()}
            stored[f"{case}.decoded"] = module.dequantize()
    linear = torch.nn.Linear(64, 48, bias=False)
    linear.weight.data = weight.bfloat16()
    config = BaseQuantizeConfig(nbits=4, group_size=None, axis=0)
    module = HQQLinear(linear, config, compute_dtype=torch.bfloat16, device="cpu")
    stored |= {f"columns.{name}": each for name, each in module.state_dict().items()}
    stored["columns.decoded"] = module.dequantize()
    save_file({name: each.contiguous() for name, each in stored.items()}, Path(__file__).with_suffix(".safetensors"))


if __name__ == "__main__":
    main()
