"""What Triton's kernels make of numbers on a device, and what PyTorch makes of the same on a CPU."""

from collections.abc import Iterator

import torch
from torch import Tensor

from precisionctl.model.model_shape import ModelShape
from precisionctl.trainer.model import gpu_kernels
from precisionctl.trainer.model.loss import loss
from precisionctl.trainer.model.mlp import activate
from precisionctl.trainer.model.positions import rotate
from precisionctl.trainer.sequences import Positions

HEADS = ((128, 64, 20), (80, 16, 5), (64, 32, 1), (96, 24, 3))
"""A head's size, the pairs of it that are rotated, and the number of heads."""

MODEL = ModelShape("llama", 1, 64, 1500, 1, 1, 64, 100, 100, 100)

Pair = tuple[str, Tensor, Tensor]


def pairs(device: str, dtype: torch.dtype) -> Iterator[Pair]:
    """Outputs and gradients of both, by name, on the CPU."""
    for size, rotated, number in HEADS:
        for rows in ((2, 9), (9,)):  # angles of each row's own, and of all
            angles = torch.rand(*rows, rotated) * 6
            laid = torch.randn(2, 9, number, 3, size).to(dtype)
            query = laid[:, :, :, 1]  # as it lies between keys and values
            cos, sin = angles.cos()[..., None, :], angles.sin()[..., None, :]
            kernel = gpu_kernels.rotate_by(laid.to(device)[:, :, :, 1], cos.to(device), sin.to(device))
            expected = rotate(query, Positions(angles.cos(), angles.sin(), None, None, (2, 9)), interleaved=False)
            yield f"rope, {rotated} pairs of {size}", kernel.cpu(), expected
    values, gradient = torch.randn(3, 5, 3000).to(dtype), torch.randn(3, 5, 1500).to(dtype)
    on_device, here = values.to(device, copy=True).requires_grad_(), values.requires_grad_()
    kernel, expected = gpu_kernels.SwiGLU.apply(on_device), activate(here, MODEL, 0)
    kernel.backward(gradient.to(device))
    expected.backward(gradient)
    assert on_device.grad is not None and here.grad is not None
    yield "SwiGLU", kernel.detach().cpu(), expected.detach()
    yield "SwiGLU's gradient", on_device.grad.cpu(), here.grad
    for vocab_size in (9000, 8990, 5):
        logits = (torch.randn(1, 18, 9000) * 3).to(dtype).requires_grad_()
        targets, mask = torch.randint(vocab_size, (1, 18)), torch.ones(1, 18, dtype=torch.bool)
        total = loss(logits, targets, mask, vocab_size)
        total.backward()
        assert logits.grad is not None
        rows = logits.detach()[0].to(device)
        sums = gpu_kernels.log_sums(rows, vocab_size)
        weights, wanted = torch.ones(18, device=device), targets[0].to(device)
        made = gpu_kernels.logit_gradients(rows, sums, wanted, weights, vocab_size)
        of_targets = rows.gather(1, wanted[:, None]).squeeze(1).float()
        yield f"cross entropy of {vocab_size}", (sums - of_targets).sum().cpu(), total.detach()
        yield f"its gradient of {vocab_size}", made.cpu(), logits.grad[0]
