"""What the decoder's layers share: they add blocks to the residual stream, and forget activations where told to."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from precisionctl.model.model_shape import ModelShape
from precisionctl.trainer.backends.base import Backend
from precisionctl.trainer.model.attention.self_attention import KeysValues
from precisionctl.trainer.model.positions import LayerKind, layer_kind
from precisionctl.trainer.sequences import Positions


class Beside(NamedTuple):
    """What a layer reads beside the residual stream."""

    per_layer: Tensor | None = None
    """What is made of the tokens for this layer alone, `[T, P]` (`Embedding.per_layer`)."""
    shared: KeysValues | None = None
    """The keys and values of another layer."""
    put_aside: tuple[Tensor, ...] = ()
    """The residual stream before each earlier layer that `puts_aside`, `[T, E]`."""


NOTHING = Beside()


class ResidualLayer(nn.Module):
    """A layer; `through` is what it computes. `recompute` keeps no activation for the backward but the input, and keys
    and values that other layers read."""

    puts_aside = False
    """Whether later layers also read the stream that it is given."""

    def __init__(self, model: ModelShape, number: int, backend: Backend, recompute: bool) -> None:
        super().__init__()
        self.backend, self.recompute = backend, recompute
        self.kind, self.residual_multiplier = layer_kind(model, number), model.residual_multiplier
        self._kv_is_read = any(model.kv_layer(layer) == number for layer in range(number + 1, model.num_layers))

    def forward(
        self, hidden: Tensor, positions: dict[LayerKind, Positions], beside: Beside = NOTHING
    ) -> tuple[Tensor, KeysValues | None]:
        """`[T, E]` to the same, and the keys and values that later layers read, if any do. Between regions of tensor
        ranks, T are those of this rank."""
        here = positions[self.kind]
        if self.recompute and torch.is_grad_enabled():
            made: tuple[Tensor, KeysValues | None] = self.backend.recomputed(self._computed, hidden, here, beside)
            return made
        return self._computed(hidden, here, beside)

    def _computed(self, hidden: Tensor, positions: Positions, beside: Beside) -> tuple[Tensor, KeysValues | None]:
        """What a layer recomputes: keys and values that no layer reads are gone before it ends."""
        out, kept = self.through(hidden, positions, beside)
        return out, kept if self._kv_is_read else None

    def through(self, hidden: Tensor, positions: Positions, beside: Beside) -> tuple[Tensor, KeysValues | None]:
        """What the layer computes, at the positions of its kind, and the keys and values that it made, if any."""
        raise NotImplementedError

    def added(self, hidden: Tensor, block: Tensor) -> Tensor:
        """The residual stream with what a block gives."""
        return torch.add(hidden, block, alpha=self.residual_multiplier)
