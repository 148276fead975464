"""Writes `fp_quant_codes.safetensors`: weights as FP-Quant stores them, and as `<case>.decoded` what they stand for.

    TRITON_INTERPRET=1 PYTHONPATH=FP_QUANT:FP-QUANT python fp_quant_codes.py     where fp_quant, scipy and triton are
    installed, and the sources of IST-DASLab/FP-Quant; PyTorch, on a CPU

Real codes are made and multiplied by FP-Quant's own Quantizer (d2e3092), pseudo-quantized weights by the kernels of
fp_quant 0.3.2. Rotating them back is the transpose of the matrix that inputs are multiplied by, here in FP64.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from safetensors.torch import save_file

sys.modules["fast_hadamard_transform"] = without = ModuleType("fast_hadamard_transform")
without.hadamard_transform = None  # type: ignore[attr-defined]


def untuned(**_: object) -> Any:
    """triton.autotune, which needs a GPU to choose a size."""
    return _Untuned


class _Untuned:
    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda **arguments: self.kernel[grid](**arguments, BLOCK_SIZE=32 * 32)


triton.autotune = untuned

from fp_quant import FPQuantConfig, FPQuantDtype, FPQuantLinear  # noqa: E402
from fp_quant.module.linear import get_gsr_matrix, get_hadamard_matrix  # noqa: E402
from src.quantization.quant_ops import cast_scales_to_eXmY, pack_fp4_to_uint8  # noqa: E402
from src.quantization.quantizer import Quantizer  # noqa: E402

FORMATS = {"mxfp4": ("mxfp", 32, "e8m0"), "nvfp4": ("nvfp", 16, "e4m3")}
CASES = [
    *(("mxfp4", 32, get_hadamard_matrix), ("mxfp4", 128, get_gsr_matrix)),
    *(("nvfp4", 16, get_hadamard_matrix), ("nvfp4", 64, get_gsr_matrix)),
]


def back(rotated: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return (rotated.double().view(-1, len(matrix)) @ matrix.double().t()).view(rotated.shape)


def of_codes(weight: torch.Tensor, form: str, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    name, group, precision = FORMATS[form]
    rotated = (weight.double().view(-1, len(matrix)) @ matrix.double()).view(weight.shape).float()
    quantizer = Quantizer(4, format=name, granularity="group", group_size=group, scale_precision=precision)
    scales, zeros = quantizer.get_quantization_params(rotated)
    codes, divisor = quantizer.quantize(rotated, scales, zeros), quantizer.global_scale
    stored = cast_scales_to_eXmY(scales * divisor, precision)
    held = stored.view(torch.float8_e8m0fnu if precision == "e8m0" else torch.float8_e4m3fn).double()
    exact = codes.double() * held.repeat_interleave(group, 1)
    assert torch.allclose((exact / divisor).float(), quantizer(rotated, scales, zeros), rtol=1e-6)
    return {
        "qweight": pack_fp4_to_uint8(codes),
        "scales": stored,
        "weight_global_scale": divisor.clone(),
        "decoded": (back(exact, matrix) / divisor).float(),  # in this order, in which nothing is rounded before it
    }


def pseudo(weight: torch.Tensor, form: str, size: int, init: Any) -> dict[str, torch.Tensor]:
    config = FPQuantConfig(
        forward_dtype=FPQuantDtype(form),
        forward_method="abs_max",
        backward_dtype=FPQuantDtype.BF16,
        hadamard_group_size=size,
        pseudoquantization=True,
        transform_init="gsr" if init is get_gsr_matrix else "hadamard",
    )
    linear = FPQuantLinear(weight.shape[1], weight.shape[0], config, bias=False, dtype=torch.bfloat16)
    linear.weight.data.copy_(weight)
    linear.pre_forward()
    stored = {name: each for name, each in linear.state_dict().items() if each is not None}
    return stored | {"decoded": back(stored["dqweight"], stored["forward_hadamard_matrix"]).float()}


def main() -> None:
    torch.manual_seed(0)
    weight = (torch.randn(16, 256) * torch.rand(16, 1)).bfloat16().float()
    zeros = weight.clone()
    zeros[3, 64:128] = 0  # of which the kernels make NaN
    stored = {}
    for form, size, init in CASES:
        matrix = init(size, torch.bfloat16, torch.device("cpu"))
        made = of_codes(zeros, form, matrix) | {"forward_hadamard_matrix": matrix}
        stored |= {f"{form}-{size}.{name}": each for name, each in made.items()}
        stored |= {f"{form}-{size}-pseudo.{name}": each for name, each in pseudo(weight, form, size, init).items()}
    save_file({name: each.contiguous() for name, each in stored.items()}, Path(__file__).with_suffix(".safetensors"))


if __name__ == "__main__":
    main()
