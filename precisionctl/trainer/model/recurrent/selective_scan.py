"""Mamba-1's selective scan in plain PyTorch (arXiv 2312.00752, algorithm 2), chunk by chunk.

Each channel has a state `h` `[K]`, of zeros at first, of which each number decays at its own rate `A`, by what the
channel's step `dt` says, and to which each token adds its number `x`: `h' = exp(dt A) h + dt x B`, and of which it
reads `C^T h'`. There are too many rates for products of tokens with each other, as Mamba-2 has them, so within a chunk
the states of all tokens are made by a parallel prefix scan.

Shape letters: B batch, S sequence, L tokens of a chunk, D channels, K channels of a state.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from precisionctl.trainer.backends.base import recompute
from precisionctl.trainer.model.recurrent.recurrence import CHUNK


def selective_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """`x` and `dt` `[B, S, D]`, `A` `[D, K]`, `B` and `C` `[B, S, K]`; gives `[B, S, D]`, computed and returned in FP32
    or wider. States of single tokens are too large to keep: the backward computes each chunk again."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, dt, A, B, C = (each.to(wide) for each in (x, dt, A, B, C))
    state, made = x.new_zeros(len(x), *A.shape), []
    chunks = zip(*(torch.split(each, CHUNK, 1) for each in (x * dt, dt, B, C)), strict=True)
    for chunk in chunks:
        given, state = recompute(_scan_chunk, state, A, *chunk, again=nullcontext())
        made.append(given)
    return torch.cat(made, 1)


def _scan_chunk(state: Tensor, A: Tensor, added: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """Of the state before a chunk `[B, D, K]` and its tokens, `added` being `dt x`: what they read `[B, L, D]`, and the
    state after it."""
    decay = (dt[..., None] * A).exp()  # [B, L, D, K]
    states = added[..., None] * B[:, :, None]
    reach = 1
    while reach < decay.shape[1]:
        # `states` has what the last `reach` tokens added, as it is now, and `decay` what decays over all of these
        earlier = F.pad(states[:, :-reach], (0, 0, 0, 0, reach, 0))
        states = states + decay * earlier
        decay = decay * F.pad(decay[:, :-reach], (0, 0, 0, 0, reach, 0), value=1.0)
        reach *= 2
    states = states + decay * state[:, None]
    return (states @ C[..., None])[..., 0], states[:, -1].clone()  # a view would keep all of the states
