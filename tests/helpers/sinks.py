"""Softmax attention with sinks, written out."""

import torch
from torch import Tensor


def written_out(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float, window: int | None) -> Tensor:
    """`[B, S, heads, D]` to `[B, S, heads, channels of a value]`."""
    key, value = (each.repeat_interleave(query.shape[2] // key.shape[2], 2) for each in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * scale
    distance = torch.arange(query.shape[1])[:, None] - torch.arange(query.shape[1])
    unseen = (distance < 0) | (distance >= (window or query.shape[1]))
    exponentials = scores.masked_fill(unseen, -torch.inf).exp()
    shares = exponentials / (exponentials.sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    return torch.einsum("bhqk,bkhd->bqhd", shares, value)
