"""What gated delta nets, Mamba mixers and short convolutions share: a causal convolution, and texts that begin with
nothing that another left; and what the first two share, a state that is computed chunk by chunk.

Shape letters: B batch, S sequence, N heads.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.trainer.backends.base import Backend
from precisionctl.trainer.sequences import Positions

CHUNK = 64
"""Tokens; as many as Megatron-Core's and transformers' delta rules take."""


def by_text(function: Callable[[Tensor], Tensor], tokens: Tensor, positions: Positions) -> Tensor:
    """`function`, of texts that are S tokens long, `[B, S, channels]`, applied to all tokens `[T, channels]`; gives
    `[T, ...]`."""
    if positions.packed is None:
        return function(tokens.view(*positions.shape, -1)).flatten(0, 1)
    # each text by itself: none begins with what another left in the state, or in the convolution
    texts = torch.split(tokens[None], list(positions.packed.lengths), 1)
    return torch.cat([function(text) for text in texts], 1).flatten(0, 1)


def convolution(channels: int, taps: int, backend: Backend, bias: bool = False, apart: int = 1) -> nn.Conv1d:
    """Of a tensor rank's part of so many channels, each by itself. Taps are so many tokens `apart`."""
    own, dtype, device = channels // backend.world.tensor.size, backend.dtype, backend.device
    return nn.Conv1d(own, own, taps, groups=own, dilation=apart, bias=bias, dtype=dtype, device=device)


def convolved(channels: Tensor, conv: nn.Conv1d) -> Tensor:
    """The causal convolution of each channel by itself, `[B, S, channels]` to the same."""
    padded = F.pad(channels.mT, ((conv.kernel_size[0] - 1) * conv.dilation[0], 0))
    return F.conv1d(padded, conv.weight, conv.bias, dilation=conv.dilation, groups=conv.groups).mT


def in_chunks(tensor: Tensor) -> Tensor:
    """`[B, S, N, ...]` as `[B, N, chunks, CHUNK, ...]`, with zeros behind the last token: they change no state."""
    padded = F.pad(tensor, (0, 0, 0, 0, 0, -tensor.shape[1] % CHUNK))
    heads = padded.transpose(1, 2)
    return heads.reshape(*heads.shape[:2], -1, CHUNK, heads.shape[-1])


def decays_between(past: Tensor) -> Tensor:
    """What decays from each token of a chunk to each later one, `[..., CHUNK, CHUNK]`, and 0 to each earlier one; of
    the logarithm of what decays from the chunk's beginning to each token, `[..., CHUNK, 1]`."""
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=past.device).tril()
    return (past - past.mT).masked_fill(~lower, -torch.inf).exp()
