"""Writes `aqlm_codes.safetensors`: random codes of AQLM's modules, and as `<case>.decoded` what AQLM makes of them.

    PYTHONPATH=AQLM python aqlm_codes.py     where aqlm is unpacked; PyTorch, on a CPU

By aqlm 1.1.7 (utils.py, _dequantize_weight). Sums of several vectors are in FP16 and FP32 alone: those in BF16 it
rounds otherwise on a CPU than on a GPU.
"""

from pathlib import Path

import torch
from aqlm.utils import _dequantize_weight, pack_int_data, unpack_int_data
from safetensors.torch import save_file

CASES = {
    "1x8-bfloat16": (1, 8, 1, 8, torch.bfloat16),
    "2x8-float16": (2, 8, 1, 8, torch.float16),
    "1x12-float16": (1, 12, 1, 4, torch.float16),
    "4x6-rows-float16": (4, 6, 4, 8, torch.float16),
    "8x8-float32": (8, 8, 1, 8, torch.float32),
}


def main() -> None:
    torch.manual_seed(0)
    stored = {}
    for case, (books, bits, high, wide, dtype) in CASES.items():
        codes = pack_int_data(torch.randint(1 << bits, (24 // high, 64 // wide, books)), bits)
        tensors = {
            "codes": codes,
            "codebooks": torch.randn(books, 1 << bits, high, wide).to(dtype),
            "scales": torch.rand(24 // high, 1, 1, 1).to(dtype),
        }
        stored |= {f"{case}.{name}": each for name, each in tensors.items()}
        stored[f"{case}.decoded"] = _dequantize_weight(
            unpack_int_data(codes, bits), tensors["codebooks"], tensors["scales"]
        )
    save_file({name: each.contiguous() for name, each in stored.items()}, Path(__file__).with_suffix(".safetensors"))


if __name__ == "__main__":
    main()
