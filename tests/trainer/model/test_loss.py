"""Cross entropy chunk by chunk, beside PyTorch's own of all logits at once."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from precisionctl.trainer.model import loss as module
from precisionctl.trainer.model.loss import loss
from precisionctl.trainer.parallel.group_ranks import TensorRanks


def of_all(logits: Tensor, targets: Tensor, mask: Tensor, vocab_size: int) -> Tensor:
    wanted = targets.masked_fill(~mask, -100).flatten()
    return F.cross_entropy(logits[..., :vocab_size].flatten(0, 1).float(), wanted, reduction="sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [64, 61])
def test_loss_and_gradients_are_those_of_all_logits_at_once(
    dtype: torch.dtype, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FP32_LOGITS_ON_CPU", 64 * 5)  # the last of four chunks has three rows
    torch.manual_seed(0)
    logits, targets = (3 * torch.randn(2, 9, 64)).to(dtype), torch.randint(vocab_size, (2, 9))
    mask = torch.rand(2, 9) > 0.3
    targets[~mask] = -100
    one, other = (logits.clone().requires_grad_() for _ in range(2))
    expected, found = of_all(one, targets, mask, vocab_size), loss(other, targets, mask, vocab_size)
    (expected / 7).backward()
    (found / 7).backward()
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert one.grad is not None and other.grad is not None and other.grad.dtype == dtype
    torch.testing.assert_close(other.grad, one.grad, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-7)
    assert not other.grad[~mask].any() and not other.grad[..., vocab_size:].any()


@dataclass(frozen=True)
class Threads(TensorRanks):
    """Tensor ranks that are threads of this process."""

    met: Barrier = field(default_factory=lambda: Barrier(1))
    shown: dict[int, Tensor] = field(default_factory=dict)

    def _every(self, values: Tensor) -> Tensor:
        self.shown[self.rank] = values
        self.met.wait(20)
        every = torch.stack([self.shown[rank] for rank in range(self.size)])
        self.met.wait(20)
        return every

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        return self._every(values).sum(0)

    def all_reduce_max(self, values: Tensor) -> Tensor:
        return self._every(values).amax(0)


@pytest.mark.parametrize("vocab_size", [64, 61, 32, 30])
def test_ranks_with_parts_of_the_logits_have_the_same_loss_and_their_parts_of_the_gradients(vocab_size: int) -> None:
    """Of every token as the target, so also of those at the ends of parts, and with a part that is padding alone."""
    torch.manual_seed(0)
    logits, targets = 3 * torch.randn(1, vocab_size, 64), torch.arange(vocab_size)[None]
    mask, whole = targets != 5, logits.clone().requires_grad_()
    expected = of_all(whole, targets, mask, vocab_size)
    expected.backward()
    met, shown = Barrier(2), dict[int, Tensor]()

    def part(rank: int) -> tuple[Tensor, Tensor]:
        mine = logits[..., 32 * rank : 32 * (rank + 1)].clone().requires_grad_()
        found = loss(mine, targets, mask, vocab_size, Threads(2, rank, met=met, shown=shown))
        found.backward()
        assert mine.grad is not None
        return found.detach(), mine.grad

    with ThreadPoolExecutor(2) as threads:
        found, gradients = zip(*threads.map(part, range(2)), strict=True)
    assert whole.grad is not None and torch.equal(*found)
    assert found[0].item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(torch.cat(gradients, -1), whole.grad, rtol=1e-5, atol=1e-7)


class Largest(TorchDispatchMode):
    """The most elements of an FP32 tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_iter(made) if isinstance(each, Tensor) and each.dtype == torch.float32]
        self.elements = max([self.elements, *sizes])
        return made


def test_logits_are_never_all_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FP32_LOGITS_ON_CPU", 1000)
    logits = torch.randn(4, 32, 100, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(100, (4, 32))
    with Largest() as seen:
        loss(logits, targets, targets > 10, 100).backward()
    assert seen.elements == 1000


def test_a_logit_that_is_not_a_number_makes_a_loss_that_is_none() -> None:
    logits = torch.zeros(1, 3, 8)
    logits[0, 1, 2] = torch.nan
    targets = torch.zeros(1, 3, dtype=torch.int64)
    assert loss(logits, targets, torch.ones(1, 3, dtype=torch.bool), 8).isnan()
    logits[0, 1, 2] = torch.inf
    assert not loss(logits, targets, torch.ones(1, 3, dtype=torch.bool), 8).isfinite()
