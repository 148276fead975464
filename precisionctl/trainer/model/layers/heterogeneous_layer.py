"""A layer of which a search has left out attention, the MLP or both, as Megatron-Core's heterogeneous layers are."""

from torch import Tensor

from precisionctl.model.model_shape import ModelShape
from precisionctl.trainer.backends.base import Backend, norm_of
from precisionctl.trainer.model.attention.self_attention import KeysValues, SelfAttention
from precisionctl.trainer.model.layers.residual_layer import Beside, ResidualLayer
from precisionctl.trainer.model.mlp import MLP
from precisionctl.trainer.sequences import Positions


class HeterogeneousLayer(ResidualLayer):
    """What the layer has of attention and an MLP, each with its norm in its first linear, and added to the residual
    stream."""

    def __init__(self, name: str, model: ModelShape, number: int, backend: Backend, recompute: bool = False) -> None:
        super().__init__(model, number, backend, recompute)
        here = model.of_layer(number)
        self.self_attention: SelfAttention | None = None
        if model.has_attention(number):
            self.self_attention = SelfAttention(f"{name}.self_attention", here, backend)
        self.mlp: MLP | None = None
        if model.has_dense_mlp(number):
            self.mlp = MLP(f"{name}.mlp", here, backend, here.ffn_hidden_size, norm_of(model), number)

    def through(self, hidden: Tensor, positions: Positions, beside: Beside) -> tuple[Tensor, KeysValues | None]:
        if self.self_attention is not None:
            hidden = self.added(hidden, self.self_attention(hidden, positions)[0])
        return hidden if self.mlp is None else self.added(hidden, self.mlp(hidden)), None
