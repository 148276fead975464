"""Writes `torchao_codes.safetensors`: weights as torchao stores them, and as `<case>.decoded` what it makes of them.

    PYTHONPATH=TORCHAO python torchao_codes.py     where its wheel is unpacked; PyTorch

By torchao 0.18.0, on a CPU. The metadata is torchao's; `experts` is one tensor of two experts.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file


def main() -> None:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8Tensor,
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
    stored, metadata = flatten_tensor_state_dict(named)
    stored |= {f"{case}.decoded": tensor.dequantize() for case, tensor in tensors.items()}
    stored["mlp.experts.decoded"] = experts.dequantize()
    file = Path(__file__).with_suffix(".safetensors")
    save_file({name: each.contiguous() for name, each in stored.items()}, file, metadata)


if __name__ == "__main__":
    main()
