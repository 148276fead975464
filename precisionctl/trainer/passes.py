"""Passes through a run's model: the gradients of an update, and the loss on held-out data."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from precisionctl.trainer.data import IGNORED, Batch, Blend, Rows
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.model.loss import loss
from precisionctl.trainer.run import Run
from precisionctl.trainer.shadow import Bf16Passes


def accumulate_gradients(run: Run, batches: Sequence[Batch], targets: int) -> Tensor:
    """Forward and backward of an update's micro-batches; the optimizer collects the sum of their gradients. Returns
    their loss, and those of the routers, summed over the targets of all ranks, FP32 `[1 + losses]`. `targets` is the
    number of these targets."""
    total, losses = torch.zeros((), device=run.device), run.model.router_losses
    if losses:
        losses.begin_update()
    with run.model.backend.same_weights() if run.casts_once(len(batches)) else nullcontext():
        for number, batch in enumerate(batches, start=1):
            run.world.begin_pass(run.model, last=number == len(batches))
            run.model.backend.begin_pass(run.recipe.train.seed, run.step, number)
            with run.meter.last_pass() if number == len(batches) else nullcontext():
                total += backward(run.model, batch, targets)
            run.optimizer.collect()
    run.optimizer.reduce(run.world)
    return run.world.sum_over_data_ranks(torch.cat([total[None], *([losses.sums] if losses else [])]))


def bf16_passes(run: Run, batches: Sequence[Batch], targets: int) -> Bf16Passes:
    """Make the passes of an update of an FP8 run in BF16. Nothing in the run changes."""
    micro_batch_size = run.recipe.train.micro_batch_size
    in_fp8 = held_out_loss(run.model, run.held_out, micro_batch_size) if run.held_out else None
    with run.model.in_bf16():
        mean = float(accumulate_gradients(run, batches, targets)[0]) / targets
        gradients = run.optimizer.take_gradients()
        held_out = None
        if run.held_out and in_fp8 is not None:
            held_out = in_fp8, held_out_loss(run.model, run.held_out, micro_batch_size)
    return Bf16Passes(mean, gradients, held_out)


def backward(model: GPT, batch: Batch, targets: int) -> Tensor:
    """Forward and backward of a micro-batch; gradients are those of its summed loss and of the routers', divided
    by the update's `targets`. Returns the summed loss without the routers', FP32 `[]`."""
    total, losses = summed_loss(model, batch), model.router_losses
    of_routers = losses.end_pass(batch.targets) if losses else 0.0
    ((total + of_routers) / targets).backward()  # type: ignore[no-untyped-call]
    return total.detach()


def recording_pass(model: GPT, batch: Batch, targets: int) -> Tensor:
    """As `backward`, for a pass of which nothing but amaxes is kept (warm-up, calibration). It does not depend on
    earlier ones, which routers' losses over an update do: a calibration that was killed goes on from any pass."""
    if losses := model.router_losses:
        losses.begin_update()
    total = backward(model, batch, targets)
    model.zero_grad()
    return total


def held_out_loss(model: GPT, rows: Rows | Blend, micro_batch_size: int) -> float:
    """Mean loss over all targets of `rows`, in the precision that the model trains in; no FP8 state changes."""
    world, device = model.backend.world, model.backend.device
    starts = range(0, len(rows), micro_batch_size)
    total, targets = 0.0, 0
    with torch.no_grad():
        for turn in range(0, len(starts), world.data_count):
            start = starts[min(turn + world.data_rank, len(starts) - 1)]
            batch = rows.batch(range(start, min(start + micro_batch_size, len(rows)))).to(device)
            summed = float(summed_loss(model, batch))  # every rank runs every pass: FSDP gathers layers from all ranks
            if turn + world.data_rank < len(starts):
                total += summed
                targets += batch.targets
        world.reshard(model)
    mine = torch.tensor([total, targets], dtype=torch.float64, device=device)
    all_total, all_targets = world.sum_over_data_ranks(mine).tolist()
    return float(all_total / all_targets)


def summed_loss(model: GPT, batch: Batch) -> Tensor:
    """Cross entropy summed over a batch's targets, FP32 `[]`."""
    logits = model(batch.tokens, batch.padding_mask if batch.padded else None, batch.packed)
    mask, ranks = batch.labels != IGNORED, model.backend.world.tensor
    return loss(logits, batch.labels, mask, model.model.vocab_size, ranks)
