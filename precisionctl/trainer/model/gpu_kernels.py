"""One Triton kernel each for what PyTorch computes by many: rotary embedding, SwiGLU, cross entropy.

A kernel rounds to BF16 where the PyTorch operations do that it stands for. Rotary embedding, which makes no fused
multiply-adds either, has all their bits; exponentials and quotients differ in FP32's last ones.

Raise RuntimeError where a graph of their own gradients is asked for (`create_graph=True`): there is none.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS, _CHANNELS, _LOGITS = 16, 1024, 4096
"""Numbers along a dimension that a program of a kernel takes at a time."""


def _launching(*operands: Tensor) -> AbstractContextManager[object]:
    """Around a launch, which Triton makes on the current device."""
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        raise RuntimeError("Triton's kernels have no second derivatives")
    return torch.cuda.device(operands[0].device) if operands[0].is_cuda else nullcontext()


def rotate_by(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope over pairs (i, i + P) of `[B, S, heads, D]`; `cos` and `sin` FP32 `[S, 1, P]` or `[B, S, 1, P]`."""
    batch, length, number, size = heads.shape
    heads = heads if heads.stride(-1) == 1 else heads.contiguous()
    cos, sin = (angles.contiguous().expand(batch, length, 1, -1) for angles in (cos, sin))
    out = torch.empty((batch, length, number, size), dtype=heads.dtype, device=heads.device)
    pairs = cos.shape[-1]
    at_once = min(_HEADS, triton.next_power_of_2(number))
    with _launching(heads):
        _rotate[batch * length, triton.cdiv(number, at_once)](
            heads,
            cos,
            sin,
            out,
            length,
            number,
            *heads.stride()[:3],
            *cos.stride()[:2],
            *sin.stride()[:2],
            PAIRS=pairs,
            SIZE=size,
            PAIRS_BLOCK=triton.next_power_of_2(pairs),
            REST_BLOCK=triton.next_power_of_2(max(size - 2 * pairs, 1)),
            HEADS=at_once,
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def _rotate(
    heads,
    cos,
    sin,
    out,
    length,
    number,
    batch_stride,
    place_stride,
    head_stride,
    cos_batch_stride,
    cos_place_stride,
    sin_batch_stride,
    sin_place_stride,
    PAIRS: tl.constexpr,
    SIZE: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row, place = token // length, token % length
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]).to(tl.int64)
    source = heads + row * batch_stride + place * place_stride + head * head_stride
    target = out + (token * number + head) * SIZE
    pair = tl.arange(0, PAIRS_BLOCK)[None, :]
    c = tl.load(cos + row * cos_batch_stride + place * cos_place_stride + pair, mask=pair < PAIRS)
    s = tl.load(sin + row * sin_batch_stride + place * sin_place_stride + pair, mask=pair < PAIRS)
    mask = (head < number) & (pair < PAIRS)
    first = tl.load(source + pair, mask=mask).to(tl.float32)
    second = tl.load(source + PAIRS + pair, mask=mask).to(tl.float32)
    tl.store(target + pair, first * c - second * s, mask=mask)
    tl.store(target + PAIRS + pair, second * c + first * s, mask=mask)
    if SIZE > 2 * PAIRS:
        rest = 2 * PAIRS + tl.arange(0, REST_BLOCK)[None, :]
        mask = (head < number) & (rest < SIZE)
        tl.store(target + rest, tl.load(source + rest, mask=mask), mask=mask)


class SwiGLU(torch.autograd.Function):
    """`silu(gate) * up` of `[..., 2 * F]`: F of the gate, then F of the up projection."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        values = values.contiguous()
        ctx.save_for_backward(values)
        size = values.shape[-1] // 2
        out = torch.empty((*values.shape[:-1], size), dtype=values.dtype, device=values.device)
        if out.numel():  # experts may have no tokens
            with _launching(values):
                _swiglu[out.numel() // size, triton.cdiv(size, _CHANNELS)](values, out, size, BLOCK=_CHANNELS)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        size = values.shape[-1] // 2
        out = torch.empty_like(values)
        if out.numel():
            grid = gradient.numel() // size, triton.cdiv(size, _CHANNELS)
            with _launching(values, gradient):
                _swiglu_gradient[grid](values, gradient.contiguous(), out, size, BLOCK=_CHANNELS)
        return out


@triton.jit
def _swiglu(values, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(values + row * 2 * size + column, mask=mask)
    up = tl.load(values + row * 2 * size + size + column, mask=mask).to(tl.float32)
    wide = gate.to(tl.float32)
    silu = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * size + column, silu * up, mask=mask)


@triton.jit
def _swiglu_gradient(values, gradient, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(values + row * 2 * size + column, mask=mask)
    up = tl.load(values + row * 2 * size + size + column, mask=mask).to(tl.float32)
    passed = tl.load(gradient + row * size + column, mask=mask).to(tl.float32)
    wide = gate.to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-wide))
    silu = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    of_silu = (passed * up).to(gate.dtype).to(tl.float32)
    of_gate = of_silu * sigmoid * (1 + wide * (1 - sigmoid))
    tl.store(out + row * 2 * size + column, of_gate, mask=mask)
    tl.store(out + row * 2 * size + size + column, passed * silu, mask=mask)


def log_sums(rows: Tensor, size: int) -> Tensor:
    """FP32 `[tokens]`: the logarithm of the sum of the exponentials of each row's first `size` logits."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = torch.empty(len(rows), device=rows.device)
    with _launching(rows):
        _log_sums[(len(rows),)](rows, out, rows.stride(0), SIZE=size, BLOCK=_LOGITS, num_warps=8)
    return out


@triton.jit
def _log_sums(rows, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, SIZE, BLOCK):
        logits = tl.load(rows + row * stride + start + column, mask=start + column < SIZE, other=-float("inf"))
        largest = tl.maximum(largest, logits.to(tl.float32))
    top = tl.max(largest, 0)
    top = tl.where(tl.abs(top) == float("inf"), 0.0, top)  # infinity less infinity is no number
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        logits = tl.load(rows + row * stride + start + column, mask=start + column < SIZE, other=-float("inf"))
        total += tl.exp(logits.to(tl.float32) - top)
    tl.store(out + row, top + tl.log(tl.sum(total, 0)))


def logit_gradients(rows: Tensor, log_sums: Tensor, targets: Tensor, weights: Tensor, size: int) -> Tensor:
    """Of losses times `weights`, FP32 `[tokens]`, in the dtype of `rows`: of the first `size` logits, as
    `log_sums` has them, and zeros. `targets` are columns, or -1."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = torch.zeros_like(rows) if size < rows.shape[1] else torch.empty_like(rows)
    if size:
        grid, strides = (len(rows), triton.cdiv(size, _LOGITS)), (rows.stride(0), out.stride(0))
        with _launching(rows, weights):
            _logit_gradients[grid](
                rows, log_sums, targets, weights, out, *strides, SIZE=size, BLOCK=_LOGITS, num_warps=8
            )
    return out


@triton.jit
def _logit_gradients(
    rows, log_sums, targets, weights, out, stride, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    logits = tl.load(rows + row * stride + column, mask=mask).to(tl.float32)
    shares = tl.exp(logits - tl.load(log_sums + row))
    target = (column == tl.load(targets + row)).to(tl.float32)
    tl.store(out + row * out_stride + column, (shares - target) * tl.load(weights + row), mask=mask)
