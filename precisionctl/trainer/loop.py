"""The training loop: rows in, updates of the model out, and nothing else kept in mind but two numbers.

`step` (updates made) and `position` (rows taken from the order) are all that a run needs beside its tensors
to go on exactly where it was.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from precisionctl.errors import PrecisionError
from precisionctl.trainer.data import IGNORED, Batch, Blend, Rows
from precisionctl.trainer.jump import Jump
from precisionctl.trainer.measure.metrics import MetricsLog
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.model.loss import loss
from precisionctl.trainer.run import Run
from precisionctl.trainer.stopping import Stop, agreed, stop_signals
from precisionctl.trainer.telling import OnStep, Told, Update
from precisionctl.trainer.transfers import Coming, Moment


class Saves(Protocol):
    """What the loop asks of whoever saves a run (`saving.Saver`)."""

    def save(self) -> None: ...
    def poll(self) -> None: ...
    def finish(self) -> None: ...


def train(
    run: Run, log: MetricsLog | None, saves: Saves, on_step: OnStep, until: float = math.inf
) -> Stop | Jump | None:
    """Go on to the recipe's last step, saving as it says. On SIGTERM or SIGINT, and when `time.monotonic()` is at
    `until`, save and return why. Of several ranks the first has a log and hears of steps, and what stops one stops all.
    Where the guard sees a jump, that is returned; what is under way is saved.

    Raises PrecisionError where too many steps running have no loss or gradients that are numbers, and where the guard
    has stopped the run, which is saved.
    """
    told = Told(run, log, on_step)
    if run.recipe.train.graphs:
        run.capture()
    with stop_signals() as received:
        try:
            while run.step < run.recipe.train.steps:
                if run.guard:
                    run.guard.begin(run)
                with run.shown():
                    loss = told.of(_measured_step(run))
                saves.poll()
                if run.guard and (jump := run.guard.after_step(run, loss)):
                    saves.finish()
                    return jump
                if (stop := agreed(run.world, received, until)) or _is_due(run):
                    told.finish()
                    if log:
                        log.sync()
                    saves.save()
                if stop:
                    saves.finish()
                    return stop
        except PrecisionError:  # of all ranks
            saves.finish()
            raise
        saves.finish()
    return None


def _is_due(run: Run) -> bool:
    """Whether the run is to be saved as it stands."""
    train = run.recipe.train
    return run.step % train.save_every == 0 or run.step == train.steps or (run.guard is not None and run.guard.stops)


def update(run: Run) -> tuple[Tensor, int]:
    """One optimizer step. Returns its summed loss and the gradients' norm, FP32 `[2]`, and its targets.

    Where one is no number, on every rank alike, the weights and the optimizer stay as they are, and the step counts;
    the device decides that."""
    batches, targets = run.batches(run.position)
    run.meter.count(batches)
    if run.guard:
        run.guard.before_passes(run, batches, targets)
    total = passes(run, batches, targets)
    if run.guard:
        run.guard.after_passes(run, lambda: float(total) / targets)
    numbers = torch.stack([total, run.optimizer.clip()])
    skip = ~numbers.isfinite().all()
    run.optimizer.step(run.rate(run.step + 1), skip)
    run.model.backend.forget_infinite(skip)
    if run.recorder:
        run.recorder.forget_infinite(skip)
    run.step += 1
    run.position += run.recipe.train.batch_size
    return numbers, targets


def passes(run: Run, batches: Sequence[Batch], targets: int) -> Tensor:
    """Forward and backward of an update's micro-batches; the optimizer has the sum of their gradients. Returns their
    loss, summed over its `targets`, FP32 `[]`."""
    total = torch.zeros((), device=run.device)
    with run.model.backend.same_weights() if run.casts_once(len(batches)) else nullcontext():
        for number, batch in enumerate(batches, start=1):
            with run.meter.last_pass() if number == len(batches) else nullcontext():
                total += backward(run.model, batch, targets)
            run.optimizer.collect()
    run.optimizer.reduce(run.world)
    return run.world.sum_of_data(total)


def backward(model: GPT, batch: Batch, targets: int) -> Tensor:
    """Forward and backward of a micro-batch of an update with `targets` in all. Returns its summed loss, FP32 `[]`."""
    total = summed_loss(model, batch)
    (total / targets).backward()  # type: ignore[no-untyped-call]
    return total.detach()


def held_out_loss(model: GPT, rows: Rows | Blend, micro_batch_size: int) -> float:
    """Mean loss over all targets of `rows`, in the precision that the model trains in; no FP8 state changes."""
    world, device = model.backend.world, model.backend.device
    starts = range(0, len(rows), micro_batch_size)
    total, targets = 0.0, 0
    with torch.no_grad():
        for turn in range(0, len(starts), world.data_count):
            start = starts[min(turn + world.data_rank, len(starts) - 1)]
            batch = rows.batch(range(start, min(start + micro_batch_size, len(rows)))).to(device)
            summed = float(summed_loss(model, batch))  # by every rank: layers come from all of them
            if turn + world.data_rank < len(starts):
                total += summed
                targets += batch.targets
        world.rest(model)
    mine = torch.tensor([total, targets], dtype=torch.float64, device=device)
    all_total, all_targets = world.sum_of_data(mine).tolist()
    return float(all_total / all_targets)


def _measured_step(run: Run) -> Update:
    run.meter.begin()
    begun = Moment(run.device)
    numbers, targets = update(run)
    if run.meter.health is not None:
        numbers = torch.cat([numbers, run.meter.health])
    coming, taken, ended = Coming(numbers), run.meter.metered(), Moment(run.device)
    train = run.recipe.train
    look = run.held_out is not None and (run.step % train.eval_every == 0 or run.step == train.steps)
    return Update(
        run.step,
        targets,
        coming,
        taken,
        begun,
        ended,
        held_out_loss=held_out_loss(run.model, run.held_out, train.micro_batch_size) if look and run.held_out else None,
        fp8=run.recorder is None if run.guard else None,
        shadow=run.guard.seen() if run.guard else None,
    )


def summed_loss(model: GPT, batch: Batch) -> Tensor:
    """Cross entropy summed over a batch's targets, FP32 `[]`."""
    logits = model(batch.tokens, batch.real if batch.padded else None, batch.segments)
    mask, ranks = batch.labels != IGNORED, model.backend.world.tensor
    total, _ = loss(logits, batch.labels, mask, model.model.vocab_size, ranks)
    return total
