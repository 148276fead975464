"""Transformer Engine's compiled functions in plain PyTorch, after the source of its kernels (its folder `common`).

Those that linears, norms, attention without kernels and FusedAdam call, under per-tensor scaling, by the names and with
the parameters of `transformer_engine_torch`; for `te_on_cpu.py`.
"""

import enum
from typing import Any

import numpy as np
import te_blocks
import torch
from torch import Tensor


class DType(enum.IntEnum):
    """NVTEDType of transformer_engine.h."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


CODES = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}
DTYPES = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}
FORWARD = [f"GEMM{gemm}_{role}" for gemm in (1, 2, 3) for role in ("INPUT", "WEIGHT", "OUTPUT")]
BACKWARD = [f"{role}{gemm}" for gemm in (1, 2, 3) for role in ("GRAD_OUTPUT", "GRAD_INPUT")]
LARGEST = torch.finfo(torch.float32).max


def _largest_code(dtype: int) -> float:
    return torch.finfo(CODES[DType(dtype)]).max


def _current_scale(amax: Tensor, quantizer: Any) -> Tensor:
    """recipe_common.cuh, compute_scale_from_amax."""
    amax = amax.clamp(min=quantizer.amax_epsilon)
    scale = torch.full((), _largest_code(quantizer.dtype)) / amax
    scale = torch.where(scale.isinf(), LARGEST, scale)
    scale = torch.where(amax.isfinite() & (amax != 0), scale, 1.0)
    if quantizer.force_pow_2_scales:
        scale = torch.exp2(scale.log2().floor())
    return scale.reshape(1)


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """A cast under a tensor's scale; under delayed scaling its amax is left in the quantizer, by atomic maximum. Where
    the flag `noop` is not zero, which the kernel reads, all stays as it is."""
    if quantizer is None:
        return tensor
    kind = type(quantizer).__name__
    if kind == "Float8BlockQuantizer":
        return te_blocks.quantize(tensor, quantizer, output, CODES[DType(quantizer.dtype)], noop)
    if kind not in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        raise NotImplementedError(f"{kind} is not stood in for")
    values = tensor.detach().float()
    amax = values.abs().amax().nan_to_num(0.0, torch.inf) if values.numel() else torch.zeros(())
    if hasattr(quantizer, "scale"):
        scale = quantizer.scale.detach().reshape(1).clone()
        te_blocks.put(quantizer.amax, torch.fmax(quantizer.amax, amax.reshape(quantizer.amax.shape)), noop)
    else:
        if quantizer.with_amax_reduction:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
        scale = _current_scale(amax, quantizer)
    limit = _largest_code(quantizer.dtype)
    codes = (values * scale).clamp(-limit, limit).to(CODES[DType(quantizer.dtype)]).view(torch.uint8)
    if output is not None:
        te_blocks.put(output._data, codes, noop)
        te_blocks.put(output._scale_inv, scale.reciprocal(), noop)
        if output._transpose is not None:
            te_blocks.put(output._transpose, _transposed(codes), noop)
            output._transpose_invalid = False
        return output
    return _stored(codes, scale.reciprocal(), quantizer, tensor.dtype)


def _stored(codes: Tensor, scale_inv: Tensor, quantizer: Any, dtype: torch.dtype) -> Any:
    """As on Hopper: rows for one GEMM, and a transposed copy where another wants columns."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    parts = {
        "data": codes if quantizer.rowwise_usage else None,
        "fp8_scale_inv": scale_inv,
        "fp8_dtype": quantizer.dtype,
        "data_transpose": _transposed(codes) if quantizer.columnwise_usage else None,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        return Float8TensorStorage(**parts, fake_dtype=dtype)
    return Float8Tensor(shape=codes.shape, dtype=dtype, device=codes.device, **parts)


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: Any, pinned: bool
) -> Any:
    return _stored(torch.zeros(shape, dtype=torch.uint8), torch.ones(1), quantizer, dtype)


def _transposed(codes: Tensor) -> Tensor:
    """`[..., columns]` to `[columns, ...]`."""
    return codes.movedim(-1, 0).contiguous()


def fp8_transpose(codes: Tensor, dtype: int, out: Tensor | None = None) -> Tensor:
    made = _transposed(codes)
    return made if out is None else out.copy_(made)


def dequantize(stored: Any, dtype: int) -> Tensor:
    return _decoded(stored).to(DTYPES[DType(dtype)])


def _decoded(operand: Any) -> Tensor:
    codes, scale_inv = _codes(operand)
    return codes if scale_inv is None else codes * scale_inv


def _codes(operand: Any, columnwise: bool = False) -> tuple[Tensor, Tensor | None]:
    """Values as FP32 and what they are multiplied by; None for a tensor that is not FP8."""
    if not hasattr(operand, "_fp8_dtype"):
        return operand.float(), None
    dtype = CODES[DType(operand._fp8_dtype)]
    if hasattr(operand, "_is_2D_scaled"):
        return te_blocks.decoded(operand, columnwise, dtype), None
    rows, columns = operand._data, operand._transpose
    if rows is None or (columns is not None and operand._transpose_invalid):
        rows = columns.movedim(0, -1) if rows is None else rows
    return rows.view(dtype).float() if rows.is_contiguous() else rows.contiguous().view(
        dtype
    ).float(), operand._scale_inv


def generic_gemm(
    A, transa, B, transb, D, quantizer, out_dtype, bias, bias_dtype, gelu, gelu_in, grad, workspace, workspace_size,
    accumulate, use_split_accumulator, comm_overlap=None, comm_type=None, extra_output=None, bulk_overlap=False,
    alpha=1.0, beta=None,
):  # fmt: skip
    """cuBLAS stores columns first: the rows of D are those of op(B) times op(A)."""
    assert not gelu and comm_overlap is None, "not stood in for"
    (left, left_inv), (right, right_inv) = _codes(B, transb), _codes(A, not transa)
    shape = left.shape[:-1] if not transb else left.shape[-1:]
    left, right = left.flatten(0, -2), right.flatten(0, -2)
    product = (left.mT if transb else left) @ (right.mT if transa else right)
    for scale_inv in (left_inv, right_inv):
        product = product if scale_inv is None else product * scale_inv
    bias_grad = None
    if bias is not None and grad:
        bias_grad = _decoded(B).flatten(0, -2).sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias.float()
    product = product.view(*shape, product.shape[-1])
    if quantizer is not None:
        return quantize(product, quantizer), bias_grad, None, extra_output
    if D is None:
        kind = DTYPES[DType(out_dtype)] if out_dtype is not None else A.dtype
        return product.to(kind), bias_grad, None, extra_output
    D.copy_(D + product.view(D.shape) if accumulate else product.view(D.shape))
    return D, bias_grad, None, extra_output


def te_general_grouped_gemm(
    A, transa, B, transb, D, D_type, m_splits, bias, bias_type, single_output, pre_gelu_out, grad, workspace,
    workspace_size, accumulate, use_split_accumulator, sm_count,
):  # fmt: skip
    outs = torch.split(D[0], list(m_splits)) if single_output else D
    for i, out in enumerate(outs):
        empty = bias[i].numel() == 0
        _, bias_grad, _, _ = generic_gemm(
            A[i], transa, B[i], transb, out, None, None, None if empty else bias[i], bias_type, False, None, grad,
            None, 0, accumulate, use_split_accumulator,
        )  # fmt: skip
        if bias_grad is not None:
            bias[i].copy_(bias_grad)
    return bias


def bgrad_quantize(grad_output: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    bias_grad = grad_output.detach().float().flatten(0, -2).sum(0).to(grad_output.dtype)
    return bias_grad, quantize(grad_output, quantizer)


def split_quantize(
    tensor: Tensor, sections: list[int], quantizers: list[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    parts = torch.split(tensor, list(sections))
    return [quantize(part.contiguous(), one) for part, one in zip(parts, quantizers, strict=True)]


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def _normed(out: Tensor, ln_out: Tensor | None, quantizer: Any, dtype: torch.dtype) -> Any:
    """normalization.cpp: only delayed scaling casts the FP32 values themselves."""
    if quantizer is not None and hasattr(quantizer, "scale"):
        stored = quantize(out, quantizer)
        stored._dtype = dtype
        return stored
    rounded = out.to(dtype)
    if quantizer is not None:
        return quantize(rounded, quantizer)
    return rounded if ln_out is None else ln_out.copy_(rounded)


def rmsnorm_fwd(x, weight, eps, ln_out, quantizer, dtype, sm_margin, zero_centered):
    wide = x.float()
    rsigma = torch.rsqrt(wide.square().mean(-1) + eps)
    out = wide * rsigma[..., None] * _gamma(weight, zero_centered)
    return _normed(out, ln_out, quantizer, x.dtype), None, rsigma


def layernorm_fwd(x, weight, bias, eps, ln_out, quantizer, dtype, sm_margin, zero_centered):
    wide = x.float()
    mu = wide.mean(-1)
    rsigma = torch.rsqrt(wide.var(-1, correction=0) + eps)
    out = (wide - mu[..., None]) * rsigma[..., None] * _gamma(weight, zero_centered) + bias.float()
    return _normed(out, ln_out, quantizer, x.dtype), mu, rsigma


def _norm_gradients(function, dz, x, *parameters):
    leaves = [part.detach().float().requires_grad_() for part in (x, *parameters)]
    with torch.enable_grad():
        function(*leaves).backward(dz.float())
    return [leaf.grad.to(x.dtype) for leaf in leaves]


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered):
    def function(values, weight):
        # eps is in rsigma alone: mean square = rsigma**-2 - eps, with eps constant
        eps = rsigma.float().pow(-2) - x.float().square().mean(-1)
        return (
            values
            * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps[..., None])
            * _gamma(weight, zero_centered)
        )

    return _norm_gradients(function, dz.view_as(x), x, gamma)


def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered):
    def function(values, weight, bias):
        eps = rsigma.float().pow(-2) - x.float().var(-1, correction=0)
        spread = values.var(-1, correction=0, keepdim=True) + eps[..., None]
        normed = (values - values.mean(-1, keepdim=True)) * torch.rsqrt(spread)
        return normed * _gamma(weight, zero_centered) + bias

    return _norm_gradients(function, dz.view_as(x), x, gamma, torch.zeros_like(gamma))


def fused_amax_and_scale_update_after_reduction(reduced, histories, scales, algorithm, dtype, margin):
    """delayed_scaling.cu: one block of threads for each tensor."""
    last = torch.split(reduced, [len(scale) for scale in scales])
    limit = torch.tensor(_largest_code(dtype) * 2.0**-margin)
    for history, scale, amaxes in zip(histories, scales, last, strict=True):
        for column in range(len(scale)):
            now = amaxes[column] if amaxes[column] != 0 else history[0, column].clone()
            if now == 0:
                continue  # not used in this step: all stays as it is
            rows = torch.stack([*history[1:, column], now])
            amax = rows.nan_to_num(0.0, torch.inf).amax() if algorithm == "max" else now
            history[:, column] = rows
            history[0, column] = 0
            if amax > 0 and amax.isfinite():
                new = limit / amax
                scale[column] = LARGEST if new.isinf() else new


def fused_multi_row_padding(source: Tensor, out: Tensor, counts: list[int], padded: list[int]) -> None:
    out.zero_()
    for rows, place in zip(torch.split(source, list(counts)), torch.split(out, list(padded)), strict=True):
        place[: len(rows)] = rows


def fused_multi_row_unpadding(source: Tensor, out: Tensor, padded: list[int], counts: list[int]) -> None:
    for rows, place in zip(torch.split(source, list(padded)), torch.split(out, list(counts)), strict=True):
        place.copy_(rows[: len(place)])


def convert_thd_to_bshd(tensor: Tensor, ends: Tensor, batch: int, longest: int) -> Tensor:
    made = tensor.new_zeros(batch, longest, *tensor.shape[1:])
    for row, text in zip(made, torch.split(tensor, ends.diff().tolist()), strict=True):
        row[: len(text)] = text
    return made


def convert_bshd_to_thd(tensor: Tensor, ends: Tensor, tokens: int) -> Tensor:
    texts = [row[:length] for row, length in zip(tensor, ends.diff().tolist(), strict=True)]
    return torch.cat(texts)


def multi_tensor_adam(chunk, noop, lists, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay):
    """multi_tensor_adam.cu; mode 1 is AdamW. Lists: gradients, parameters, both moments, and FP32 masters if any."""
    assert mode == 1, "not stood in for"
    beta1, beta2 = (torch.tensor(beta).item() for beta in (beta1, beta2))  # floats in the kernel
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for gradient, parameter, m, v, *master in zip(*lists, strict=True):
        grad, values = gradient.float(), (master[0] if master else parameter).float()
        m.copy_(beta1 * m.float() + (1 - beta1) * grad)
        v.copy_(beta2 * v.float() + (1 - beta2) * grad * grad)
        update = (m.float() / first) / ((v.float() / second).double().sqrt().float() + epsilon) + weight_decay * values
        values = values - lr * update
        parameter.copy_(values)
        if master:
            master[0].copy_(values)


def multi_tensor_l2norm(chunk, noop, lists, per_tensor):
    """multi_tensor_l2norm_kernel.cu: the norm of all tensors, `[1]`."""
    assert not per_tensor, "not stood in for"
    return torch.stack([values.float().norm() for values in lists[0]]).norm().view(1), None


def multi_tensor_scale(chunk, noop, lists, scale):
    """multi_tensor_scale_kernel.cu. Lists: what is scaled, and where the results go."""
    for values, scaled in zip(*lists, strict=True):
        scaled.copy_(values.float() * scale)


def relu(values: Tensor, quantizer: Any) -> Any:
    return quantize(torch.relu(values), quantizer)


FLT_MAX = np.finfo(np.float32).max


def fused_kernel_step(history, scale, fp8_max, margin, algorithm):
    """One column's update, scalar by scalar: `kernel_bulk` of TransformerEngine's
    transformer_engine/common/recipe/delayed_scaling.cu, without a reduction buffer. Changes `history` (a list of
    np.float32, row 0 first) in place, as the kernel does, and returns the new scale."""
    scaled_max = np.float32(fp8_max) * np.float32(2.0) ** np.float32(-margin)
    length = len(history)
    last_amax = history[0]
    amax = np.float32(0)
    if last_amax != 0:
        for i in range(length):
            row = history[i + 1] if i < length - 1 else last_amax
            amax = row if np.isnan(amax) or row > amax else amax  # fmaxf: the other operand where one is NaN
            history[i] = row if i > 0 else np.float32(0)
    if algorithm == "most_recent":
        amax = last_amax
    new = scaled_max / amax if np.isfinite(amax) and amax > 0 else scale
    return FLT_MAX if np.isinf(new) else new
