"""Layers as CUDA graphs, captured by Transformer Engine: their kernels are launched by one call of the host instead of
dozens. What FP8 keeps between passes, TE updates outside of the graphs."""

from collections.abc import Callable, Iterable
from typing import Any

import torch  # before Transformer Engine, which needs torch's libraries to be loaded
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common.recipe import Recipe

from precisionctl.trainer.model.positions import Positions


class _Stage(nn.Module):
    """A layer at positions that are the same in every pass. TE wants modules, called with tensors alone."""

    def __init__(self, layer: nn.Module, positions: dict[bool, Positions]) -> None:
        super().__init__()
        self.layer, self._positions = layer, positions

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.layer(hidden, self._positions)
        return out


class Graphs:
    """`[T, E]` through layers, forward and backward, for hidden states of the shape and dtype of `like`. They replay
    the GEMMs of `recipe`, or of BF16 where that is None, over parameters and FP8 state where those lie.

    With `is_first_microbatch`, which is asked at each pass, casts of weights are kept in memory of the graphs' own, and
    a flag on the device says whether they are made anew (graph.py, _make_graphed_callables: cache_quantized_params).
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        positions: dict[bool, Positions],
        like: Tensor,
        recipe: Recipe | None,
        is_first_microbatch: Callable[[], bool] | None,
    ) -> None:
        stages = tuple(_Stage(layer, positions) for layer in layers)
        # an input of its own for each: the backward reads it
        samples = tuple((torch.zeros_like(like, requires_grad=True),) for _ in stages)
        self._is_first_microbatch = is_first_microbatch
        self._stages: tuple[nn.Module, ...] = te.make_graphed_callables(
            stages,
            samples,
            enabled=recipe is not None,
            recipe=recipe,
            cache_quantized_params=is_first_microbatch is not None,
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        how: dict[str, Any] = {}
        if self._is_first_microbatch:
            how["is_first_microbatch"] = self._is_first_microbatch()
        for stage in self._stages:
            hidden = stage(hidden, **how)
        return hidden
