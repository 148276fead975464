"""Matrix products of BF16 tensors on a CPU for which PyTorch has no kernels for them.

It has those (oneDNN's) where a CPU has AVX-512, or BF16 instructions on ARM. Elsewhere a linear's forward and backward
take over twenty times as long in BF16 as in FP32, so FP32 computes them: sums in FP32 and one rounding, as those
kernels do.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def product(compute: Callable[..., Tensor], *operands: Tensor | None) -> Tensor:
    """`compute(*operands)`, of operands in one dtype, in which the result is too, and its gradients."""
    dtypes = {operand.dtype for operand in operands if operand is not None and operand.is_cpu}
    if dtypes != {torch.bfloat16} or cpu_has_bf16_kernels():
        return compute(*operands)
    out: Tensor = _ThroughFp32.apply(compute, *operands)  # type: ignore[no-untyped-call]
    return out


@cache
def cpu_has_bf16_kernels() -> bool:
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _ThroughFp32(torch.autograd.Function):
    """The backward computes the forward again, so nothing in FP32 has to be kept until then: that would be twice the
    memory of the weights and activations."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *operands: Tensor | None) -> Tensor:
        ctx.compute = compute
        ctx.save_for_backward(*operands)
        return compute(*(None if operand is None else operand.float() for operand in operands)).bfloat16()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        wide = [
            None if operand is None else operand.float().requires_grad_(needs)
            for operand, needs in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.compute(*wide)
        asked = [each for each in wide if each is not None and each.requires_grad]
        found = iter(torch.autograd.grad(out, asked, gradient.float()))
        return None, *(next(found).bfloat16() if needs else None for needs in needed)
