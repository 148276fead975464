"""Mamba-2's state space in plain PyTorch, chunk by chunk (arXiv 2405.21060, section 6: SSD).

Each head has a state `h` `[K, D]`, of zeros at first, which decays by `exp(g)` and to which each token adds its numbers
`x`: `h' = exp(g) h + B x^T`, and of which it reads `C^T h'`. Within a chunk that is a product of all tokens with each
other, as in attention; what came before it is in the state.

Shape letters: B batch, S sequence, N heads of D channels, in G groups that share the vectors B and C of K channels.
"""

import torch
from torch import Tensor

from precisionctl.trainer.model.recurrent.recurrence import decays_between, in_chunks


def state_space(x: Tensor, g: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """`x` `[B, S, N, D]`, `g` `[B, S, N]`, `B` and `C` `[B, S, G, K]`, N a multiple of G; gives `[B, S, N, D]`,
    computed and returned in FP32 or wider."""
    length, channels = x.shape[1], x.shape[3]
    wide, groups = torch.promote_types(x.dtype, torch.float32), B.shape[2]
    B, C = (in_chunks(each.to(wide)) for each in (B, C))  # [B, G, chunks, CHUNK, K]
    x, g = (
        torch.unflatten(in_chunks(each.to(wide)), 1, (groups, -1)) for each in (x, g[..., None])
    )  # [B, G, heads of a group, chunks, CHUNK, ...]
    past = g.cumsum(4)  # the logarithm of what decays from a chunk's beginning to each token
    whole = past[..., -1:, :]
    inside = ((C @ B.mT)[:, :, None] * decays_between(past)) @ x
    added = B.mT @ _side_by_side(x * (whole - past).exp())
    left = _side_by_side(whole.exp().expand(*whole.shape[:-1], channels))
    state = torch.zeros_like(added[:, :, 0])  # [B, G, K, heads of a group * D]
    before = []
    for chunk in range(added.shape[2]):
        before.append(state)
        state = left[:, :, chunk] * state + added[:, :, chunk]
    from_state = torch.unflatten(C @ torch.stack(before, 2), -1, (-1, channels)).movedim(4, 2)
    made = inside + from_state * past.exp()
    return made.flatten(1, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)


def _side_by_side(heads: Tensor) -> Tensor:
    """`[B, G, heads of a group, chunks, ..., D]` as `[B, G, chunks, ..., heads of a group * D]`."""
    return heads.movedim(2, 4).flatten(4)
