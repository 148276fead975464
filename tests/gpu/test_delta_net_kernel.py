"""Gated delta nets by flash-linear-attention's kernel, and by the rule in plain PyTorch."""

from importlib.util import find_spec

import pytest
import torch
from te_pairs import sqnr

from precisionctl.trainer.model.recurrent import delta_rule


@pytest.mark.parametrize("length", [64, 200])
def test_the_kernel_computes_the_rule_and_its_gradients(length: int) -> None:
    if delta_rule._flash_kernel() is None:
        if find_spec("fla") is None:
            pytest.skip("flash-linear-attention is not installed: its wheel is to be carried")
        pytest.skip("flash-linear-attention says that its gradients are wrong on Hopper with Triton 3.4.0 to 3.7.0")
    heads = [torch.randn(2, length, count, 64, device="cuda").bfloat16() for count in (2, 2, 4)]
    decay, beta = -torch.rand(2, length, 4, device="cuda"), torch.rand(2, length, 4, device="cuda")
    gradient, made = torch.randn(2, length, 4, 64, device="cuda"), []
    for dtype in (torch.bfloat16, torch.float32):  # FP32 is never the kernel's
        given = [each.to(dtype).requires_grad_() for each in heads]
        rates = [each.clone().requires_grad_() for each in (decay, beta)]
        out = delta_rule.gated_delta_rule(*given, *rates)
        out.backward(gradient.to(dtype))
        made.append([out, *(each.grad for each in (*given, *rates))])
    for kernel, ours in zip(*made, strict=True):
        assert sqnr(ours, kernel) > 35
