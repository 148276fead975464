"""Cross entropy of the next token, of whole logits or of a tensor rank's part of them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from precisionctl.trainer.model.kernels import kernels_for
from precisionctl.trainer.parallel.group_ranks import NO_TENSOR_PARALLELISM, TensorRanks

FP32_LOGITS, FP32_LOGITS_ON_CPU = 1 << 24, 1 << 18
"""Most logits that are in FP32 at a time: on a CPU so many that they stay in a core's cache, twice as fast."""


def loss_bytes(logits: int, *, gpu: bool) -> int:
    """Bytes of so many BF16 logits and their gradients; where no kernel computes the loss, also of a chunk of them in
    FP32 with another number that is made of each."""
    return (2 + 2) * logits + (0 if gpu else (4 + 4) * min(logits, FP32_LOGITS_ON_CPU))


def loss(
    logits: Tensor, targets: Tensor, mask: Tensor, vocab_size: int, ranks: TensorRanks = NO_TENSOR_PARALLELISM
) -> Tensor:
    """Cross entropy in FP32, summed over the targets where `mask` is True, `[]`.

    A sum and no mean, so that micro-batches add up exactly to their batch. Logits are `[B, S, V]`, targets and mask
    `[B, S]`. Columns beyond `vocab_size` are padding: no tokenizer makes those tokens and their rows hold
    anything, so they take no part in the softmax (as in transformers, whose vocabulary has no such rows). Of logits
    that tensor ranks have in parts all get the same sum.
    """
    rows, wanted, ignored = logits.flatten(0, 1), targets.flatten(), ~mask.flatten()
    total: Tensor = _SummedLoss.apply(rows, wanted, ignored, vocab_size, ranks)  # type: ignore[no-untyped-call]
    return total


class _SummedLoss(torch.autograd.Function):
    """Of rows `[tokens, V]`, of which each tensor rank has some columns; what all must know is reduced, as in
    Megatron-LM's vocab_parallel_cross_entropy. Only a chunk of the logits is in FP32 at a time, by a kernel none; all
    of them, and all of their gradients, are in their own dtype alone."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, wanted: Tensor, ignored: Tensor, vocab_size: int, ranks: TensorRanks) -> Tensor:
        first = ranks.rank * rows.shape[1]
        ctx.real = min(max(vocab_size - first, 0), rows.shape[1])
        others = (wanted < first) | (wanted >= first + ctx.real)  # that are no column of this rank's
        mine = (wanted - first).masked_fill(others, 0)
        if kernels := kernels_for(rows):
            here = kernels.log_sums(rows, ctx.real)
        else:
            here = torch.empty(len(rows), device=rows.device)
            for chunk in _chunks(rows):
                here[chunk] = rows[chunk, : ctx.real].float().logsumexp(-1)
        of_targets = rows.gather(1, mine[:, None]).squeeze(1).float()
        largest = ranks.all_reduce_max(here)
        whole = largest + ranks.all_reduce_sum((here - largest).exp()).log() if ranks.size > 1 else here
        ctx.save_for_backward(rows, mine, others, whole, ignored)
        losses = whole - ranks.all_reduce_sum(of_targets.masked_fill(others, 0))
        return losses.masked_fill(ignored, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, mine, others, whole, ignored = ctx.saved_tensors
        weights = gradient.expand(len(rows)).masked_fill(ignored, 0)
        if kernels := kernels_for(rows):
            targets = mine.masked_fill(others, -1)
            return kernels.logit_gradients(rows, whole, targets, weights, ctx.real), None, None, None, None
        made = torch.zeros_like(rows) if ctx.real < rows.shape[1] else torch.empty_like(rows)
        for chunk in _chunks(rows):
            part = rows[chunk, : ctx.real].to(torch.float32, copy=True).sub_(whole[chunk, None]).exp_()
            if ctx.real:
                part.scatter_add_(1, mine[chunk, None], others[chunk, None].float() - 1)
            made[chunk, : ctx.real] = part.mul_(weights[chunk, None])
        return made, None, None, None, None


def _chunks(rows: Tensor) -> Iterator[slice]:
    size = max(1, (FP32_LOGITS_ON_CPU if rows.device.type == "cpu" else FP32_LOGITS) // rows.shape[1])
    return (slice(start, start + size) for start in range(0, len(rows), size))
