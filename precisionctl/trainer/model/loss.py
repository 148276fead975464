"""Cross entropy of the next token, of whole logits or of a tensor rank's part of them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from precisionctl.trainer.parallel.group_ranks import NO_TENSOR_PARALLELISM, TensorRanks


def loss(
    logits: Tensor, targets: Tensor, mask: Tensor, vocab_size: int, ranks: TensorRanks = NO_TENSOR_PARALLELISM
) -> tuple[Tensor, Tensor]:
    """Cross entropy in FP32, summed over the targets where `mask` is True, and their number (int64).

    Sum and count, so that micro-batches add up exactly to their batch. Logits are `[B, S, V]`, targets and mask
    `[B, S]`. Columns beyond `vocab_size` are padding: no tokenizer makes those tokens and their rows hold
    anything, so they take no part in the softmax (as in transformers, whose vocabulary has no such rows). Of logits
    that tensor ranks have in parts all get the same sum.
    """
    wanted = targets.masked_fill(~mask, -100).flatten()
    if ranks.size > 1:
        return _loss_of_parts(logits.flatten(0, 1).float(), wanted, vocab_size, ranks), mask.sum()
    rows = logits[..., :vocab_size].flatten(0, 1).float()
    return F.cross_entropy(rows, wanted, ignore_index=-100, reduction="sum"), mask.sum()


def _loss_of_parts(rows: Tensor, wanted: Tensor, vocab_size: int, ranks: TensorRanks) -> Tensor:
    """Each rank has some columns of `[tokens, V]`; what all of them must know is summed (as in Megatron-LM's
    vocab_parallel_cross_entropy)."""
    columns = rows.shape[1]
    first = ranks.rank * columns
    beyond = torch.arange(first, first + columns, device=rows.device) >= vocab_size
    rows = rows.masked_fill(beyond, -torch.inf)
    rows = rows - ranks.all_reduce_max(rows.amax(-1, keepdim=True))
    sums = ranks.reduce(rows.exp().sum(-1))
    mine = wanted - first
    others = (mine < 0) | (mine >= columns)
    of_targets = rows.gather(1, mine.masked_fill(others, 0)[:, None]).squeeze(1).masked_fill(others, 0)
    losses = sums.log() - ranks.reduce(of_targets)
    return losses.masked_fill(wanted == -100, 0).sum()
