"""The loss of large vocabularies: what PyTorch makes of all logits in FP32, with nothing in FP32 in memory."""

import torch
import torch.nn.functional as F

from precisionctl.trainer.model.loss import loss

TOKENS, REAL, PADDED = 1024, 65_000, 65_536


def test_the_loss_is_cross_entropy_in_the_memory_of_its_gradient() -> None:
    """As `loss_bytes` counts it: a gradient in the logits' dtype."""
    logits = torch.randn(1, TOKENS, PADDED, device="cuda", dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(REAL, (1, TOKENS), device="cuda")
    mask = torch.rand(1, TOKENS, device="cuda") < 0.9
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    total = loss(logits, targets, mask, REAL)
    total.backward()
    assert torch.cuda.max_memory_allocated() - before <= 2 * logits.numel() + (8 << 20)
    assert logits.grad is not None
    wide = logits.detach()[0, :, :REAL].float().requires_grad_()
    expected = F.cross_entropy(wide, targets[0].masked_fill(~mask[0], -100), reduction="sum")
    expected.backward()
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    assert wide.grad is not None and logits.grad[0, :, REAL:].count_nonzero() == 0
    assert (logits.grad[0, :, :REAL].float() - wide.grad).norm() < 2**-8 * wide.grad.norm()
