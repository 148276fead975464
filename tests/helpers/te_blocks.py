"""Casts of Transformer Engine's Float8BlockQuantizer in plain PyTorch, for `te_kernels.py`: a scale for each 128 of a
row, or for each square of 128 x 128 of a weight, stored as its GEMM wants them.

Of blocks along rows, what another GEMM wants by columns is cast anew, from the transposed values under scales of its
own: `quantize_transpose_vector_blockwise.cu`; squares have one grid for both: `quantize_transpose_square_blockwise.cu`.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128


def put(old: Tensor, new: Tensor, noop: Tensor | None) -> None:
    """Into the old one, but where a flag on the device says that nothing is to be done."""
    old.copy_(new if noop is None else torch.where(noop.reshape(()) != 0, old, new))


def quantize(tensor: Tensor, quantizer: Any, output: Any, codes_dtype: torch.dtype, noop: Tensor | None = None) -> Any:
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage

    wide, square = tensor.detach().flatten(0, -2).float(), quantizer.block_scaling_dim == 2
    parts: dict[str, Tensor | None] = {}
    for name, values, used in (
        ("rowwise", wide, quantizer.rowwise_usage),
        ("columnwise", wide.t(), quantizer.columnwise_usage),
    ):
        codes, scale_inv = _cast(values, square, quantizer, tensor.dtype, codes_dtype) if used else (None, None)
        parts |= {f"{name}_data": codes, f"{name}_scale_inv": scale_inv}
    if parts["rowwise_data"] is not None:
        parts["rowwise_data"] = parts["rowwise_data"].view(tensor.shape)
    if parts["columnwise_data"] is not None:
        parts["columnwise_data"] = parts["columnwise_data"].view(tensor.shape[-1], *tensor.shape[:-1])
    if output is not None:
        for name, part in parts.items():
            if part is not None:
                put(getattr(output, f"_{name}"), part, noop)
        return output
    parts |= {"fp8_dtype": quantizer.dtype, "quantizer": quantizer, "is_2D_scaled": square}
    if quantizer.internal:
        return Float8BlockwiseQTensorStorage(**parts, fake_dtype=tensor.dtype)
    return Float8BlockwiseQTensor(shape=tensor.shape, dtype=tensor.dtype, device=tensor.device, **parts)


def _cast(
    values: Tensor, square: bool, quantizer: Any, dtype: torch.dtype, codes: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Codes `[rows, columns]`, and what decodes them, padded to fours: of squares `[rows / 128, columns / 128]`, else
    `[columns / 128, rows]`."""
    rows, columns = values.shape
    height = BLOCK if square else 1
    padded = F.pad(values, (0, -columns % BLOCK, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, height))  # [R, height, C, 128]
    scale = _scale(blocks.abs().amax((1, 3)), quantizer, dtype, torch.finfo(codes).max)
    limit = torch.finfo(codes).max
    made = (blocks * scale[:, None, :, None]).clamp(-limit, limit).flatten(2).flatten(0, 1)[:rows, :columns]
    stored = scale.reciprocal() if square else scale.reciprocal().t()
    return made.to(codes).view(torch.uint8).contiguous(), F.pad(stored, (0, -stored.shape[1] % 4)).contiguous()


def _scale(amax: Tensor, quantizer: Any, dtype: torch.dtype, largest_code: float) -> Tensor:
    """recipe_common.cuh, compute_scale_from_types."""
    scale = largest_code / amax.clamp(min=quantizer.amax_epsilon)
    scale = torch.where(scale.isinf(), torch.finfo(dtype).max, scale)
    scale = torch.where(amax.isfinite() & (amax != 0), scale, 1.0)
    return torch.exp2(scale.log2().floor()) if quantizer.force_pow_2_scales else scale


def decoded(stored: Any, columnwise: bool, codes_dtype: torch.dtype) -> Tensor:
    """FP32, in the tensor's own shape, from the codes that a GEMM takes."""
    name = "columnwise" if columnwise else "rowwise"
    data, scale_inv = getattr(stored, f"_{name}_data"), getattr(stored, f"_{name}_scale_inv")
    values = data.view(codes_dtype).float().flatten(1) if columnwise else data.view(codes_dtype).float().flatten(0, -2)
    rows, columns = values.shape
    if stored._is_2D_scaled:
        grid = scale_inv[:, : math.ceil(columns / BLOCK)].repeat_interleave(BLOCK, 0)[:rows]
    else:
        grid = scale_inv.t()[:rows]
    made = values * grid.repeat_interleave(BLOCK, 1)[:, :columns]
    return made.view(data.shape).movedim(0, -1) if columnwise else made.view(data.shape)
