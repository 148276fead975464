"""Writes `bitsandbytes_codes.safetensors`: weights as bitsandbytes codes them, and what it makes of them.

    PYTHONPATH=BITSANDBYTES python bitsandbytes_codes.py     where its wheel is unpacked; PyTorch

`<case>.weight` and what it stores beside that, and `<case>.decoded`, in the dtype that the case names. By bitsandbytes
0.50.2, on a CPU. Absmaxes of a doubly quantized weight are in two blocks of 256.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

SMALL, LARGE = (33, 70), (130, 130)


def main() -> None:
    from bitsandbytes import functional

    torch.manual_seed(0)
    stored = {}
    for table in ("nf4", "fp4"):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for nested in (False, True):
                case = f"{table}-{str(dtype).removeprefix('torch.')}{'-nested' if nested else ''}"
                shape = LARGE if nested and dtype == torch.bfloat16 else SMALL
                weight = (torch.randn(shape) * torch.rand(shape[0], 1)).to(dtype)
                weight[2] = 0
                codes, state = functional.quantize_4bit(weight, quant_type=table, compress_statistics=nested)
                stored |= {f"{case}.weight.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
                stored |= {f"{case}.weight": codes, f"{case}.decoded": functional.dequantize_4bit(codes, state)}
    weight = (torch.randn(SMALL) * torch.rand(SMALL[0], 1)).half()
    codes, scales, _ = functional.int8_vectorwise_quant(weight)
    stored |= {"int8.weight": codes, "int8.SCB": scales, "int8.weight_format": torch.tensor(0, dtype=torch.uint8)}
    stored["int8.decoded"] = functional.int8_vectorwise_dequant(codes, scales)
    save_file({name: each.contiguous() for name, each in stored.items()}, Path(__file__).with_suffix(".safetensors"))


if __name__ == "__main__":
    main()
