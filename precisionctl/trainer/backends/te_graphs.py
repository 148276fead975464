"""Layers as CUDA graphs, captured by Transformer Engine: one launch by the host instead of dozens. TE updates FP8 state
outside of the graphs."""

from collections.abc import Callable, Iterable
from typing import Any

import torch  # before Transformer Engine, which needs torch's libraries to be loaded
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common.recipe import Recipe


class _Stage(nn.Module):
    """A layer with fixed positions (those of all kinds of layers), as TE captures modules that are called with tensors
    only."""

    def __init__(self, layer: nn.Module, positions: Any) -> None:
        super().__init__()
        self.layer, self._positions = layer, positions

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor
        out, _ = self.layer(hidden, self._positions)
        return out


class Graphs:
    """A callable that replays layers, forward and backward, for hidden states `[T, E]` of `like`'s shape and dtype.
    Its GEMMs are those of `recipe`, or BF16 if it is None. Parameters and FP8 state are read in place.

    With `is_first_microbatch`, which is called in each pass, casts of weights are cached in the graphs' own memory, and
    a flag on the device says whether to cast again (graph.py, _make_graphed_callables: cache_quantized_params).
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        positions: Any,
        like: Tensor,
        recipe: Recipe | None,
        is_first_microbatch: Callable[[], bool] | None,
    ) -> None:
        stages = tuple(_Stage(layer, positions) for layer in layers)
        # One sample input for each layer, as the backward reads it
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
