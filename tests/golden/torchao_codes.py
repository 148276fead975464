"""Writes `torchao_codes.safetensors`: weights as torchao stores them, and as `<case>.decoded` what it makes of them.

    PYTHONPATH=TORCHAO python torchao_codes.py MSLK     where the wheels are unpacked; PyTorch

By torchao 0.18.0 and, for Int4Tensor, MSLK 1.1.0 (of `mslk-cuda` two files that need no GPU), on a CPU. The metadata is
torchao's; `experts` is one tensor of two experts. torchao decodes no Int4Tensor: of it there is the weight as it was,
`<case>.weight_before`.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def quantizer_of_mslk(folder: str) -> None:
    """Give torchao the functions that make an Int4Tensor, without the package around them, which loads CUDA."""
    file = Path(folder) / "mslk" / "quantize" / "shuffle.py"
    needed = "mslk.quantize.triton.fp8_quantize"
    sys.modules[needed] = type(sys)(needed)
    sys.modules[needed].quantize_fp8_row = None
    for package in ("mslk", "mslk.quantize", "mslk.quantize.triton"):
        sys.modules[package] = type(sys)(package)
    spec = importlib.util.spec_from_file_location("mslk.quantize.shuffle", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    users = sys.modules["torchao.quantization.quantize_.workflows.int4.int4_tensor"]
    users.int4_row_quantize_zp, users.pack_int4 = module.int4_row_quantize_zp, module.pack_int4


def main(mslk: str) -> None:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8Tensor,
        Int4Tensor,
        Int8Tensor,
        IntxUnpackedToInt8Tensor,
        MappingType,
        PerBlock,
        PerGroup,
        PerRow,
        PerTensor,
    )

    torch.manual_seed(0)
    weight = torch.randn(48, 96) * torch.rand(48, 1)
    bf16, asymmetric = weight.bfloat16(), MappingType.ASYMMETRIC
    tensors = {
        "float8-row": Float8Tensor.from_hp(bf16, granularity=PerRow()),
        "float8-tensor": Float8Tensor.from_hp(bf16, granularity=PerTensor()),
        "float8-block": Float8Tensor.from_hp(bf16, granularity=PerBlock([16, 32])),
        "float8-e5m2-float16": Float8Tensor.from_hp(weight.half(), float8_dtype=torch.float8_e5m2),
        "float8-float32": Float8Tensor.from_hp(weight),
        "int8-row": Int8Tensor.from_hp(bf16, PerRow()),
        "int8-group-asymmetric": Int8Tensor.from_hp(bf16, PerGroup(32), mapping_type=asymmetric),
        "intx-group": IntxUnpackedToInt8Tensor.from_hp(bf16, (1, 32), torch.int4),
        "intx-asymmetric-float16": IntxUnpackedToInt8Tensor.from_hp(
            weight.half(), (1, 96), torch.int8, mapping_type=asymmetric
        ),
    }
    named = {f"{case}.weight": tensor for case, tensor in tensors.items()}
    named["mlp.experts.up_proj"] = experts = Float8Tensor.from_hp(torch.stack([bf16, bf16.flip(0)]))
    quantizer_of_mslk(mslk)
    named["int4-group.weight"] = Int4Tensor.from_hp(bf16, [1, 32])
    stored, metadata = flatten_tensor_state_dict(named)
    stored |= {f"{case}.decoded": tensor.dequantize() for case, tensor in tensors.items()}
    stored["int4-group.weight_before"] = bf16
    stored["mlp.experts.decoded"] = experts.dequantize()
    file = Path(__file__).with_suffix(".safetensors")
    save_file({name: each.contiguous() for name, each in stored.items()}, file, metadata)


if __name__ == "__main__":
    main(sys.argv[1])
