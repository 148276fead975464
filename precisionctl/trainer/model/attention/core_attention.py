"""Softmax attention itself, between the projections: each query reads the values of the keys that it sees.

Shape letters as in `gpt.py`.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_shape import ModelShape
from precisionctl.model.sparse_parts import MSA
from precisionctl.trainer.backends.base import Backend
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.model.attention.block_indexer import BlockIndexer, attend_to_blocks
from precisionctl.trainer.model.positions import keys_seen, sliding_window_mask
from precisionctl.trainer.sequences import Positions


class CoreAttention(nn.Module):
    """Softmax over the keys that a query sees, of scores that may be capped (Gemma 2), or fall with distance (BLOOM).
    `softmax_offset` (gpt-oss's sinks) is, for each head, the score of one more key, whose value is zero. In long texts
    an `indexer` chooses which keys those are."""

    def __init__(self, model: ModelShape, backend: Backend, scale: float, msa: MSA | None = None) -> None:
        super().__init__()
        self.scale, self.softcap = scale, model.attn_logit_softcapping
        sinks = torch.zeros(
            model.num_attention_heads // backend.world.tensor.size, dtype=backend.dtype, device=backend.device
        )
        self.softmax_offset = nn.Parameter(sinks) if model.softmax_offset else None
        self.slopes: Tensor | None = None
        if model.alibi:
            mine = torch.tensor(alibi_slopes(model.num_attention_heads)).chunk(backend.world.tensor.size)
            self.slopes = mine[backend.world.tensor.rank].to(backend.device)
        plain = self.softcap is None and self.softmax_offset is None and not model.alibi
        self.kernel = backend.attention(model, scale) if plain else None
        self.msa = msa
        self.indexer: nn.Module | None = BlockIndexer(model, msa, backend) if msa else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Positions, index: tuple[Tensor, ...] = ()
    ) -> Tensor:
        """Queries `[B, S, G * R, D]`, keys `[B, S, G, D]` and values `[B, S, G, channels]`, with the `index` that a
        BlockIndexer makes, if it is to choose; gives `[T, G * R * channels]`."""
        heads, packed, window = (query, key, value, *index), positions.packed, positions.window
        if self.kernel is not None and not index:
            attended: Tensor = self.kernel(query, key, value, packed, window)
        elif packed is None:
            attended = self._attend(heads, window)
        else:
            # each text by itself: a mask over all would grow with the square of the row, and no flash kernel takes one
            laid = (torch.split(tensor.flatten(0, 1)[None], list(packed.lengths), 1) for tensor in heads)
            attended = torch.cat([self._attend(text, window) for text in zip(*laid, strict=True)], 1)
        return attended.reshape(query.shape[:2].numel(), -1)

    def _attend(self, heads: Sequence[Tensor], window: int | None) -> Tensor:
        """Queries, keys and values of texts that are S tokens long, and an index, if there is one; gives
        `[B, S, G * R, channels of a value]`."""
        if self.msa and len(heads) > 3:
            return attend_to_blocks(heads, self.msa, self.scale)
        query, key, value = (tensor.transpose(1, 2) for tensor in heads)
        channels = value.shape[3]
        if self.softcap is not None:
            batch, groups, length, head = key.shape
            grouped = query.reshape(batch, groups, -1, length, head)
            scores = product(torch.matmul, grouped, key[:, :, None].mT).float() * self.scale  # [B, G, R, S, S]
            scores = self.softcap * torch.tanh(scores / self.softcap)
            unseen = ~keys_seen(length, window, key.device)
            weights = scores.masked_fill(unseen, -torch.inf).softmax(-1).to(value.dtype)
            attended = product(torch.matmul, weights, value[:, :, None]).flatten(1, 2)
        else:
            mask = sliding_window_mask(key.shape[2], window, key.device)
            if self.slopes is not None:
                query, key = with_slopes(query, key, self.slopes / self.scale)
            if self.softmax_offset is not None:
                query, key, value = with_sinks(query, key, value, self.softmax_offset.float() / self.scale)
                mask = None if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)
            attention = partial(
                F.scaled_dot_product_attention,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=True,
            )
            # fused kernels take heads of one size, and a value that is 0 stays so
            narrower = max(0, key.shape[3] - value.shape[3])
            attended = product(attention, query, key, F.pad(value, (0, narrower)) if narrower else value)
            attended = attended[:, :, -heads[0].shape[1] :, :channels]
        return attended.transpose(1, 2)


SINK_CHANNELS = 8
"""How much larger heads are with sinks, or with slopes: kernels take multiples of 8."""


def with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One more query, key and value of zero before those of a text `[B, heads, S, D]`, and eight more channels. Causal
    attention over them gives the text's queries what it gives beside a sink for each head: its key is the first, with
    which every query's product is `sinks`, FP32 `[heads]`. Nothing reads what the first query is given.

    Two of the channels have the sinks in the queries' dtype and what its rounding leaves, and are 1 in the first key.
    """
    rounded = sinks.to(query.dtype)
    parts = torch.stack([rounded, (sinks - rounded.float()).to(query.dtype)], -1)
    here = parts[None, :, None].expand(*query.shape[:3], -1)
    query = F.pad(torch.cat([query, here], -1), (0, SINK_CHANNELS - 2, 1, 0))
    first = F.pad(key.new_ones(2), (key.shape[3], SINK_CHANNELS - 2)).expand(*key.shape[:2], 1, -1)
    key = torch.cat([first, F.pad(key, (0, SINK_CHANNELS))], 2)
    return query, key, F.pad(value, (0, 0, 1, 0))


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head: powers of one number for a power of two, and those of twice as many, every other one, for
    the heads beyond (transformers' modeling_bloom.py, _get_alibi_slopes)."""
    whole = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    return slopes + [2 ** (-4 * (2 * head + 1) / whole) for head in range(heads - whole)]


def with_slopes(query: Tensor, key: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys `[B, heads, S, D]` with eight more channels, whose product is the place of the key times a slope
    of the head, FP32 `[heads]`. Softmax does not tell that from a score that falls with distance.

    Both are of two parts: slopes in the queries' dtype and what its rounding leaves, places what 256 divides and the
    rest, which BF16 holds up to 65536."""
    rounded = slopes.to(query.dtype)
    parts = torch.stack([rounded, (slopes - rounded.float()).to(query.dtype)], -1).repeat_interleave(2, -1)
    place = torch.arange(key.shape[2], device=key.device)
    places = torch.stack([place - place % 256, place % 256], -1).to(key.dtype).repeat(1, 2)
    beside = (each.expand(*heads.shape[:3], -1) for each, heads in ((parts[None, :, None], query), (places, key)))
    first, second = (F.pad(each, (0, SINK_CHANNELS - 4)) for each in beside)
    return torch.cat([query, first], -1), torch.cat([key, second], -1)
