"""Rope's gradient, against what autograd makes of the formula."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from precisionctl.trainer.model.positions import rotate
from precisionctl.trainer.sequences import Positions


def by_formula(heads: Tensor, positions: Positions) -> Tensor:
    """Pairs (i, i + P), in FP32, rounded once."""
    assert positions.cos is not None and positions.sin is not None
    cos, sin = positions.cos[..., None, :], positions.sin[..., None, :]
    pairs = cos.shape[-1]
    first, second = heads[..., :pairs].float(), heads[..., pairs : 2 * pairs].float()
    turned = [(first * cos - second * sin).to(heads.dtype), (second * cos + first * sin).to(heads.dtype)]
    return torch.cat([*turned, heads[..., 2 * pairs :]], -1)


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.counted[function.__name__.partition(".")[0]] += 1
        return function(*arguments, **(keywords or {}))

    @property
    def kernels(self) -> int:
        return self.counted.total() - sum(self.counted[view] for view in ("slice", "split", "unsqueeze", "detach"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [(), (2,)], ids=["alike", "rows differ"])
@pytest.mark.parametrize("rotated", [16, 8], ids=["all", "half"])
def test_values_and_gradients_are_the_formula_s_to_the_last_bit(
    rotated: int, rows: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    angles = torch.randn(*rows, 12, rotated // 2) * 100
    positions = Positions(angles.cos() * 1.2, angles.sin() * 1.2, None, None, (2, 12))
    values, gradient = (torch.randn(2, 12, 3, 16).to(dtype) for _ in range(2))
    made, calls = {}, {}
    for name, function in (("ours", partial(rotate, interleaved=False)), ("formula", by_formula)):
        heads = values.clone().requires_grad_()
        with Calls() as counted:
            out = function(heads, positions)
            out.backward(gradient)
        made[name], calls[name] = (out.detach(), heads.grad), counted.kernels
    assert all(map(torch.equal, made["ours"], made["formula"]))
    assert calls["ours"] < (0.8 if dtype == torch.bfloat16 else 1) * calls["formula"], calls
