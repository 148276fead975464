"""MiniMax's sparse attention (arXiv 2606.13392), as transformers computes it (modeling_minimax_m3_vl.py,
MiniMaxM3VLIndexer): which blocks of keys a query sees, and attention to these. Products of all pairs of query and key
are computed, for one head of the indexer at a time, in plain PyTorch.

Shape letters: B batch, S sequence, T tokens, E hidden_size, G num_query_groups, R query heads per group, D kv_channels;
I heads of the indexer of C channels, N blocks.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model_shape import ModelShape
from precisionctl.sparse_parts import MSA
from precisionctl.trainer.backends.base import Backend, norm_of
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.model.embedding import plain_linear
from precisionctl.trainer.model.positions import Positions, rotate


class BlockIndexer(nn.Module):
    """Chooses the blocks of keys that a query sees. No gradient comes to it, and it is not trained. A tensor rank has
    all of it, and chooses for the query groups that it has: each group has a head."""

    def __init__(self, model: ModelShape, msa: MSA, backend: Backend) -> None:
        super().__init__()
        self.msa, self.ranks, norm = msa, backend.world.tensor, norm_of(model)
        self.linear_q = plain_linear(model.hidden_size, msa.query_size, backend)
        self.linear_k = plain_linear(model.hidden_size, msa.head_dim, backend)
        self.q_norm, self.k_norm = backend.norm(msa.head_dim, norm), backend.norm(msa.head_dim, norm)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, normed: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """What attention reads, `[T, E]`, to queries of this rank's groups `[B, S, I, C]` and keys `[B, S, 1, C]`."""
        normed = self.ranks.gather(normed)
        query = product(F.linear, normed, self.linear_q.weight).view(*positions.shape, -1, self.msa.head_dim)
        query = query.chunk(self.ranks.size, 2)[self.ranks.rank]
        key = product(F.linear, normed, self.linear_k.weight).view(*positions.shape, 1, self.msa.head_dim)
        return (
            rotate(self.q_norm(query), positions, interleaved=False),
            rotate(self.k_norm(key), positions, interleaved=False),
        )


@torch.no_grad()
def seen(query: Tensor, key: Tensor, msa: MSA) -> Tensor:
    """Which keys each query sees, bool `[B, S, S]`, by one head's queries and keys `[B, S, C]` of texts that are S
    tokens long."""
    length, size = key.shape[1], msa.block_size
    place = torch.arange(length, device=key.device)
    causal = place <= place[:, None]
    scores = torch.matmul(query.float(), key.float().mT).masked_fill(~causal, -torch.inf)
    scores = F.pad(scores, (0, -length % size), value=-torch.inf)
    scores = torch.unflatten(scores, -1, (-1, size)).amax(-1)  # [B, S, N]
    behind = place[:, None] // size - torch.arange(scores.shape[-1], device=key.device)
    scores = scores.masked_fill((behind >= 0) & (behind < msa.local_blocks), torch.inf)
    best = scores.topk(min(msa.topk_blocks, scores.shape[-1]), -1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    return chosen.repeat_interleave(size, -1)[..., :length] & causal


def attend_to_blocks(heads: Sequence[Tensor], msa: MSA, scale: float) -> Tensor:
    """Of texts that are S tokens long: queries `[B, S, G * R, D]`, keys `[B, S, G, D]`, values `[B, S, G, channels]`,
    and the indexer's queries and keys as it makes them, to what heads give, `[B, S, G * R, channels]`."""
    query, key, value, index_query, index_key = heads
    attention = partial(F.scaled_dot_product_attention, scale=scale)
    each = (tensor.chunk(key.shape[2], 2) for tensor in (query, key, value))
    groups = zip(*each, index_query.unbind(2), strict=True)
    given = []
    for of_group, one_key, one_value, index in groups:
        mask = seen(index, index_key[:, :, 0], msa)[:, None]
        queries = of_group.transpose(1, 2)
        # for each query head: of PyTorch's kernels on a GPU, none that takes a mask groups queries by itself
        of_heads = (one.transpose(1, 2).expand(-1, queries.shape[1], -1, -1) for one in (one_key, one_value))
        given.append(product(attention, queries, *of_heads, mask))
    return torch.cat(given, 1).transpose(1, 2)
