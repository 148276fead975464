"""What all layers of the decoder do: add to the residual stream, and forget activations where they are told to."""

import torch
from torch import Tensor, nn

from precisionctl.model_shape import ModelShape
from precisionctl.trainer.backends.base import Backend
from precisionctl.trainer.model.positions import LayerKind, Positions, kind_of


class ResidualLayer(nn.Module):
    """A layer; `through` is what it computes. `recompute` keeps no activation but the input for the backward."""

    def __init__(self, model: ModelShape, number: int, backend: Backend, recompute: bool) -> None:
        super().__init__()
        self.backend, self.recompute = backend, recompute
        self.kind, self.residual_multiplier = kind_of(model, number), model.residual_multiplier

    def forward(self, hidden: Tensor, positions: dict[LayerKind, Positions]) -> Tensor:
        """`[T, E]` to the same; between regions of tensor ranks, T are those of this rank."""
        if self.recompute and torch.is_grad_enabled():
            return self.backend.recomputed(self.through, hidden, positions[self.kind])
        return self.through(hidden, positions[self.kind])

    def through(self, hidden: Tensor, positions: Positions) -> Tensor:
        """`[T, E]` to the same, at the positions of this kind of layer."""
        raise NotImplementedError

    def added(self, hidden: Tensor, block: Tensor) -> Tensor:
        """The residual stream with what a block gives."""
        return torch.add(hidden, block, alpha=self.residual_multiplier)
