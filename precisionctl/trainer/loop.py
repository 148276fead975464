"""The training loop: rows in, updates of the model out, and nothing else kept in mind but two numbers.

`step` (updates made) and `position` (rows taken from the order) are all that a run needs beside its tensors
to go on exactly where it was.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from precisionctl.errors import PrecisionError
from precisionctl.recipe import Recipe
from precisionctl.trainer.data import IGNORED, Batch, Blend, Feed, Rows
from precisionctl.trainer.jump import Jump
from precisionctl.trainer.megatron_schedule import MegatronSchedule
from precisionctl.trainer.meter import Meter
from precisionctl.trainer.metrics import MetricsLog, StepMetrics
from precisionctl.trainer.model import GPT, loss
from precisionctl.trainer.optim import RunOptimizer, learning_rate
from precisionctl.trainer.recorder import Recorder
from precisionctl.trainer.shadow import Shadow
from precisionctl.trainer.skips import Skips, forget_infinite
from precisionctl.trainer.stopping import Stop, agreed, stop_signals
from precisionctl.trainer.world import ALONE, World

OnStep = Callable[[StepMetrics], None]


class Saves(Protocol):
    """What the loop asks of whoever saves a run (`saving.Saver`)."""

    def save(self) -> None: ...
    def poll(self) -> None: ...
    def finish(self) -> None: ...


class Watch(Protocol):
    """What a run asks of its guard (`guard.Guard`)."""

    @property
    def stops(self) -> bool: ...
    @property
    def kept(self) -> Mapping[str, object]: ...
    def start(self, step: int) -> None: ...
    def begin(self, run: "Run") -> None: ...
    def before_passes(self, run: "Run", batches: Sequence[Batch], targets: int) -> None: ...
    def after_passes(self, run: "Run", loss: float) -> None: ...
    def after_step(self, run: "Run", loss: float) -> Jump | None: ...
    def seen(self) -> Shadow | None: ...


@dataclass
class Run:
    """A run in memory, the part of it that a rank has. A BF16 run may have a recorder, to which its passes are
    shown; so has an FP8 run while it computes in BF16."""

    recipe: Recipe
    model: GPT
    optimizer: RunOptimizer
    rows: Rows | Blend
    held_out: Rows | Blend | None = None
    step: int = 0
    position: int = 0
    recorder: Recorder | None = None
    world: World = ALONE
    guard: Watch | None = None
    schedule: MegatronSchedule | None = None
    """Of the checkpoint, where it goes on instead of the recipe's."""
    skips: Skips = field(default_factory=Skips)
    feed: Feed = field(init=False)
    meter: Meter = field(init=False)

    def __post_init__(self) -> None:
        self.meter, world = Meter(self.model), self.world
        self.feed = Feed(self.rows, self.recipe.train, self.device, rank=world.data_rank, ranks=world.data_count)

    def batches(self, position: int) -> tuple[list[Batch], int]:
        """This rank's micro-batches of the update that takes its rows from `position` on, and the targets of all
        ranks' in it."""
        batches = self.feed.batches(position)
        mine = torch.tensor(sum(batch.targets for batch in batches), device=self.device)
        return batches, int(self.world.sum_of_data(mine))

    def coming(self) -> Iterator[tuple[Batch, int]]:
        """This rank's micro-batches of the next update and all later ones, each with the targets of its update."""
        for position in count(self.position, self.recipe.train.batch_size):
            batches, targets = self.batches(position)
            yield from ((batch, targets) for batch in batches)

    def shown(self) -> AbstractContextManager[None]:
        """Around passes that are shown to the recorder, if there is one."""
        return self.model.recorded_by(self.recorder) if self.recorder else nullcontext()

    def rate(self, step: int) -> float:
        """The learning rate of an update; the first is 1."""
        train = self.recipe.train
        if self.schedule:
            return self.schedule.rate(step, train.batch_size)
        return learning_rate(step, train.steps, self.recipe.optimizer.lr, self.recipe.schedule)

    @property
    def device(self) -> torch.device:
        return self.model.backend.device


def train(
    run: Run, log: MetricsLog | None, saves: Saves, on_step: OnStep, until: float = math.inf
) -> Stop | Jump | None:
    """Go on to the recipe's last step, saving as it says. On SIGTERM or SIGINT, and when `time.monotonic()` is at
    `until`, save and return why. Of several ranks the first has a log and hears of steps, and what stops one stops all.
    Where the guard sees a jump, that is returned; what is under way is saved.

    Raises PrecisionError where too many steps running have no loss or gradients that are numbers, and where the guard
    has stopped the run, which is saved.
    """
    with stop_signals() as received:
        try:
            while run.step < run.recipe.train.steps:
                if run.guard:
                    run.guard.begin(run)
                with run.shown():
                    metrics = _measured_step(run, log.tokens if log else 0)
                if log:
                    log.write(metrics)
                    on_step(metrics)
                saves.poll()
                if run.guard and (jump := run.guard.after_step(run, metrics.loss)):
                    saves.finish()
                    return jump
                if (stop := agreed(run.world, run.device, received, until)) or _is_due(run):
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


def update(run: Run) -> tuple[float, float, int]:
    """One optimizer step. Returns its loss (the mean over its targets), the gradients' norm and its targets.

    Where one is no number, on every rank alike, the weights and the optimizer stay as they are, and the step counts."""
    batches, targets = run.batches(run.position)
    run.meter.count(batches)
    if run.guard:
        run.guard.before_passes(run, batches, targets)
    mean = passes(run, batches, targets)
    if run.guard:
        run.guard.after_passes(run, mean)
    norm = run.optimizer.clip()
    if math.isfinite(mean) and math.isfinite(norm):
        run.optimizer.step(run.rate(run.step + 1))
        run.skips.running = 0
    else:
        run.optimizer.take_gradients()
        forget_infinite(run.model, run.recorder)
        run.skips.add(run.step + 1, mean, norm, run.recipe.train.max_skipped)
    run.step += 1
    run.position += run.recipe.train.batch_size
    return mean, norm, targets


def passes(run: Run, batches: Sequence[Batch], targets: int) -> float:
    """Forward and backward of an update's micro-batches; the optimizer has the sum of their gradients. Returns the
    mean loss over its `targets`."""
    total = torch.zeros((), device=run.device)
    for number, batch in enumerate(batches, start=1):
        with run.meter.last_pass() if number == len(batches) else nullcontext():
            total += backward(run.model, batch, targets)
        run.optimizer.collect()
    run.optimizer.reduce(run.world)
    return float(run.world.sum_of_data(total)) / targets


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


def _measured_step(run: Run, tokens: int) -> StepMetrics:
    run.meter.begin()
    start = time.perf_counter()
    mean, norm, targets = update(run)
    seconds = time.perf_counter() - start
    train = run.recipe.train
    look = run.held_out is not None and (run.step % train.eval_every == 0 or run.step == train.steps)
    return StepMetrics(
        step=run.step,
        loss=mean,
        lr=run.rate(run.step),
        grad_norm=norm,
        tokens=tokens + targets,
        tokens_per_second=targets / seconds,
        seconds=seconds,
        held_out_loss=held_out_loss(run.model, run.held_out, train.micro_batch_size) if look and run.held_out else None,
        fp8=run.recorder is None if run.guard else None,
        shadow=run.guard.seen() if run.guard else None,
        taken=run.meter.taken(seconds),
        skipped=run.skips.running or None,
    )


def summed_loss(model: GPT, batch: Batch) -> Tensor:
    """Cross entropy summed over a batch's targets, FP32 `[]`."""
    logits = model(batch.tokens, batch.real, batch.segments)
    mask, ranks = batch.labels != IGNORED, model.backend.world.tensor
    total, _ = loss(logits, batch.labels, mask, model.model.vocab_size, ranks)
    return total
