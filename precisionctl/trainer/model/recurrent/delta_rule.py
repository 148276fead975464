"""The gated delta rule in plain PyTorch, chunk by chunk (arXiv 2412.06464, section 3.3; by channels 2510.26692, section
3); or on a GPU, in BF16, by flash-linear-attention where that is installed and its gradients are right, but not by
channels.

Each head has a state `S` `[K, D]`, of zeros at first, which decays by `exp(g)`, one number or one for each channel K,
and learns at the rate `beta` to give the value `v` for the key `k`: `S' = exp(g) S`, then
`S = S' + beta k (v - S'^T k)^T`. Queries read it: `S^T q`. The steps of a chunk depend on one another by a triangular
system, which is solved at once.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from precisionctl.trainer.model.recurrent.recurrence import CHUNK, decays_between, in_chunks

_EPSILON = 1e-6
"""Added to the squares of a query's or a key's length, which both are divided by."""


DECAY_BLOCK = 8
"""Tokens of which all pairs are decayed channel by channel, `[DECAY_BLOCK, DECAY_BLOCK, K]`: fewer take less memory and
more products of matrices."""


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Queries and keys `[B, S, H, K]`, values `[B, S, N, D]`, `g` `[B, S, N]` or, for each channel, `[B, S, N, K]`,
    `beta` `[B, S, N]`, N a multiple of H; gives `[B, S, N, D]`, computed in FP32 or wider, in the values' dtype."""
    by_channel = g.dim() > beta.dim()
    if value.is_cuda and value.dtype == torch.bfloat16 and not by_channel and (kernel := _flash_kernel()):
        return kernel(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
    length, dtype, wide = value.shape[1], value.dtype, torch.promote_types(value.dtype, torch.float32)
    served = value.shape[2] // key.shape[2]
    query, key = (
        (heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _EPSILON)).repeat_interleave(served, 2)
        for heads in (query.to(wide), key.to(wide))
    )
    query = query * key.shape[-1] ** -0.5
    query, key, value, beta, g = (
        in_chunks(each.to(wide)) for each in (query, key, value, beta[..., None], g if by_channel else g[..., None])
    )  # [B, N, chunks, CHUNK, ...]
    past = g.cumsum(3)  # the logarithm of what decays from a chunk's beginning to each token
    if by_channel:
        system, seen = _products_by_channel(query, key, past, beta)
    else:
        between = decays_between(past)
        system, seen = beta * (key @ key.mT) * between, (query @ key.mT) * between
        del between  # as large as either of these
    learned = torch.linalg.solve_triangular(system, beta * value, upper=False, unitriangular=True)
    read = torch.linalg.solve_triangular(system, beta * past.exp() * key, upper=False, unitriangular=True)
    from_state, to_state = query * past.exp(), key * (past[..., -1:, :] - past).exp()
    whole = past[..., -1:, :].exp().mT
    state = value.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1])
    outputs = []
    for chunk in range(value.shape[2]):
        steps = learned[:, :, chunk] - read[:, :, chunk] @ state
        outputs.append(from_state[:, :, chunk] @ state + seen[:, :, chunk] @ steps)
        state = whole[:, :, chunk] * state + to_state[:, :, chunk].mT @ steps
    return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2).to(dtype)


def _products_by_channel(query: Tensor, key: Tensor, past: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The products of each token's key, times its `beta`, and of its query with the keys up to its own, which
    have decayed meanwhile, `[..., CHUNK, CHUNK]`: the triangular system, of which only what is below its diagonal
    counts, and what queries see of a chunk. Of queries and keys `[..., CHUNK, K]`, `beta` `[..., CHUNK, 1]` and the
    logarithm of what decays of each channel from the chunk's beginning to each token, `[..., CHUNK, K]`.

    Between a block's tokens decays are taken pair by pair; earlier keys decay to the block's first token, and from
    there on: each of the two exponentials is at most 1."""
    each, blocks = torch.stack((key, query), -2), []  # [..., CHUNK, 2, K]
    upper = torch.ones(DECAY_BLOCK, DECAY_BLOCK, dtype=torch.bool, device=past.device).triu(1)[..., None]
    for first in range(0, CHUNK, DECAY_BLOCK):
        block = slice(first, first + DECAY_BLOCK)
        here, pasts, start = each[..., block, :, :], past[..., block, :], past[..., first : first + 1, :]
        pairs = (pasts[..., :, None, :] - pasts[..., None, :, :]).masked_fill(upper, -torch.inf).exp()
        within = here @ (key[..., None, block, :] * pairs).mT  # [..., DECAY_BLOCK, 2, DECAY_BLOCK]
        before = key[..., :first, :] * (start - past[..., :first, :]).exp()
        since = here * (pasts - start).exp()[..., None, :]
        earlier = (since.flatten(-3, -2) @ before.mT).view(*since.shape[:-1], first)
        blocks.append(F.pad(torch.cat([earlier, within], -1), (0, CHUNK - first - DECAY_BLOCK)))
    keys, seen = torch.cat(blocks, -3).unbind(-2)
    return beta * keys, seen


@cache
def _flash_kernel() -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """The same function: of log decays, queries scaled by the root of their size, heads grouped alike, and lengths with
    the same epsilon (0.6.0, ops/gated_delta_rule/chunk.py). None without the package, and where it says that its
    gradients are wrong: there its backward raises, unless tilelang takes it over, which it does for some shapes only
    (ops/common/chunk_o.py, chunk_bwd_dqkwg)."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1
    except ImportError:
        return None
    if IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1:
        return None
    rule: Callable[..., tuple[Tensor, Tensor | None]] = chunk_gated_delta_rule
    return rule
