"""Attention to blocks of keys that an indexer chooses, as transformers computes it: MiniMax's (arXiv 2606.13392;
modeling_minimax_m3_vl.py, MiniMaxM3VLIndexer) and Qwen4-Exp's, which averages keys (modeling_qwen4_exp.py,
Qwen4ExpTextQSAIndexer). Products of all pairs of query and key are computed, in plain PyTorch.

Shape letters: B batch, S sequence, T tokens, E hidden_size, G num_query_groups, R query heads per group, D kv_channels;
I heads of the indexer of C channels, N blocks.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_shape import ModelShape
from precisionctl.model.sparse_parts import MSA
from precisionctl.trainer.backends.base import Backend, norm_of, plain_linear
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.model.positions import rotate
from precisionctl.trainer.model.recurrent.recurrence import by_text
from precisionctl.trainer.sequences import Positions


class BlockIndexer(nn.Module):
    """Chooses the blocks of keys that a query sees. No gradient comes to it, and it is not trained. A tensor rank has
    all of it, and chooses for the query groups that it has: each group has a head. Averaged blocks have one projection
    of queries and keys."""

    def __init__(self, model: ModelShape, msa: MSA, backend: Backend) -> None:
        super().__init__()
        self.msa, self.ranks, norm = msa, backend.world.tensor, norm_of(model)
        self.linear_qk: nn.Linear | None = None
        if msa.averaged:
            self.linear_qk = plain_linear(model.hidden_size, msa.query_key_size, backend)
        else:
            self.linear_q = plain_linear(model.hidden_size, msa.query_size, backend)
            self.linear_k = plain_linear(model.hidden_size, msa.head_dim, backend)
        self.q_norm, self.k_norm = backend.norm(msa.head_dim, norm), backend.norm(msa.head_dim, norm)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, normed: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """What attention reads, `[T, E]`, to queries of this rank's groups `[B, S, I, C]` and keys `[B, S, 1, C]`. An
        averaged block's key is that of its first token."""
        normed, heads = self.ranks.gather(normed), (*positions.shape, -1, self.msa.head_dim)
        if self.linear_qk is not None:
            both = product(F.linear, normed, self.linear_qk.weight)
            query, key = torch.split(both, [self.msa.query_size, self.msa.head_dim], -1)
            query, key = query.reshape(heads), by_text(self._means, key, positions).view(heads)
        else:
            query = product(F.linear, normed, self.linear_q.weight).view(heads)
            query = query.chunk(self.ranks.size, 2)[self.ranks.rank]
            key = product(F.linear, normed, self.linear_k.weight).view(heads)
        return rotate(self.q_norm(query), positions, False), rotate(self.k_norm(key), positions, False)

    def _means(self, keys: Tensor) -> Tensor:
        """Of the block of each key, in texts that are S tokens long, `[B, S, C]` to the same; what the last block gets
        if it is not whole is read by none."""
        size = self.msa.block_size
        blocks = torch.unflatten(F.pad(keys.float(), (0, 0, 0, -keys.shape[1] % size)), 1, (-1, size))
        return blocks.mean(2).repeat_interleave(size, 1)[:, : keys.shape[1]].to(keys.dtype)


@torch.no_grad()
def seen_on_average(query: Tensor, key: Tensor, msa: MSA) -> Tensor:
    """As `seen`, by queries of all heads `[B, S, I, C]` and keys of averaged blocks."""
    length, size = key.shape[1], msa.block_size
    place = torch.arange(length, device=key.device)
    whole = (place[:, None] + 1) // size  # blocks that end before a query, or with it
    blocks = key[:, ::size].float()
    scores = torch.matmul(query.float(), blocks[:, None].mT).relu().sum(2)  # [B, S, N]
    may_be_chosen = torch.arange(scores.shape[-1], device=key.device) < whole
    scores = scores.masked_fill(~may_be_chosen, -torch.inf)
    best = scores.topk(min(msa.topk_blocks, scores.shape[-1]), -1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & may_be_chosen
    behind = (place >= whole * size) & (place <= place[:, None])
    return chosen.repeat_interleave(size, -1)[..., :length] | behind


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
    masks: Iterable[Tensor]
    if msa.averaged:
        masks = repeat(seen_on_average(index_query, index_key[:, :, 0], msa), key.shape[2])
    else:
        masks = (seen(index, index_key[:, :, 0], msa) for index in index_query.unbind(2))
    given = []
    for of_group, one_key, one_value, seen_keys in zip(*each, masks, strict=True):
        mask = seen_keys[:, None]
        queries = of_group.transpose(1, 2)
        # for each query head: of PyTorch's kernels on a GPU, none that takes a mask groups queries by itself
        of_heads = (one.transpose(1, 2).expand(-1, queries.shape[1], -1, -1) for one in (one_key, one_value))
        given.append(product(partial(attention, attn_mask=mask), queries, *of_heads))
    return torch.cat(given, 1).transpose(1, 2)
