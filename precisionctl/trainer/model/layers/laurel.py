"""A learned augmented residual (LAuReL, arXiv 2411.07501, low-rank variant), with the parameter names of transformers
(modeling_gemma3n.py, Gemma3nTextLaurelBlock).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_shape import ModelShape
from precisionctl.trainer.backends.base import Backend, norm_of, plain_linear
from precisionctl.trainer.backends.bf16_products import product


class LowRankResidual(nn.Module):
    """The sum of hidden states and a projection of them through `rank` channels, which is normalised. Every tensor rank
    has all of it."""

    def __init__(self, model: ModelShape, rank: int, backend: Backend) -> None:
        super().__init__()
        self.linear_left = plain_linear(model.hidden_size, rank, backend)
        self.linear_right = plain_linear(rank, model.hidden_size, backend)
        self.post_laurel_norm = backend.norm(model.hidden_size, norm_of(model))

    def forward(self, hidden: Tensor) -> Tensor:
        """`[T, E]` to the same."""
        inner = product(F.linear, hidden, self.linear_left.weight)
        projected: Tensor = self.post_laurel_norm(product(F.linear, inner, self.linear_right.weight))
        return hidden + projected
