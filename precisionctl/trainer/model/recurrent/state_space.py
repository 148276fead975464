"""Mamba-2's state space in plain PyTorch, chunk by chunk (arXiv 2405.21060, section 6: SSD).

Each head has a state `h` `[K, D]`, of zeros at first, which decays by `exp(g)` and to which each token adds its value
`v`: `h' = exp(g) h + B v^T`, and of which it reads `C^T h'`. Within a chunk that is a product of all tokens with each
other, as in attention; what came before it is in the state.

Shape letters: B batch, S sequence, N heads of D channels, in G groups that share the vectors B and C of K channels.
"""

import torch
from torch import Tensor

from precisionctl.trainer.model.recurrent.recurrence import decays_between, in_chunks


def state_space(value: Tensor, decay: Tensor, write: Tensor, read: Tensor) -> Tensor:
    """Values `[B, S, N, D]`, `g` `[B, S, N]`, the vectors B and C `[B, S, G, K]`, N a multiple of G; gives
    `[B, S, N, D]`, computed and returned in FP32 or wider."""
    length, channels = value.shape[1], value.shape[3]
    wide, groups = torch.promote_types(value.dtype, torch.float32), write.shape[2]
    write, read = (in_chunks(each.to(wide)) for each in (write, read))  # [B, G, chunks, CHUNK, K]
    value, decays = (
        torch.unflatten(in_chunks(each.to(wide)), 1, (groups, -1)) for each in (value, decay[..., None])
    )  # [B, G, heads of a group, chunks, CHUNK, ...]
    past = decays.cumsum(4)  # the logarithm of what decays from a chunk's beginning to each token
    whole = past[..., -1:, :]
    inside = ((read @ write.mT)[:, :, None] * decays_between(past)) @ value
    added = write.mT @ _side_by_side(value * (whole - past).exp())
    left = _side_by_side(whole.exp().expand(*whole.shape[:-1], channels))
    state = torch.zeros_like(added[:, :, 0])  # [B, G, K, heads of a group * D]
    before = []
    for chunk in range(added.shape[2]):
        before.append(state)
        state = left[:, :, chunk] * state + added[:, :, chunk]
    from_state = torch.unflatten(read @ torch.stack(before, 2), -1, (-1, channels)).movedim(4, 2)
    made = inside + from_state * past.exp()
    return made.flatten(1, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)


def _side_by_side(heads: Tensor) -> Tensor:
    """`[B, G, heads of a group, chunks, ..., D]` as `[B, G, chunks, ..., heads of a group * D]`."""
    return heads.movedim(2, 4).flatten(4)
