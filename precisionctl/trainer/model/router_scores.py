"""What routers make of logits to choose experts by."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}
"""Of logits `[..., experts]`, by their name in MoE (`score_function`)."""


def over_their_sum(scores: Tensor) -> Tensor:
    """Scores `[T, experts]`, of all or of the chosen experts, normalised so that a token's add up to 1."""
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)
