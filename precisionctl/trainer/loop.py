"""The training loop: takes rows, updates the model, and reports each step.

Besides its tensors, a run needs only `step` (updates made) and `position` (rows taken from the shuffled order) to
continue exactly where it was.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from precisionctl.errors import PrecisionError
from precisionctl.trainer.measure.meter import PendingStepCost
from precisionctl.trainer.measure.metrics import MetricsLog, StepMetrics
from precisionctl.trainer.passes import accumulate_gradients, bf16_passes, held_out_loss
from precisionctl.trainer.rollback import Rollback
from precisionctl.trainer.run import Run
from precisionctl.trainer.saved.run_folder import after_step
from precisionctl.trainer.saved.saving import Saver
from precisionctl.trainer.shadow import Shadow
from precisionctl.trainer.stopping import Stop, agreed_stop, stop_signals
from precisionctl.trainer.transfers import AsyncRead, DeviceEvent

OnStep = Callable[[StepMetrics], None]


def train(
    run: Run, log: MetricsLog | None, saver: Saver, on_step: OnStep, until: float = math.inf
) -> Stop | Rollback | None:
    """Train to the recipe's last step, saving as the recipe says, and return None.

    On SIGTERM or SIGINT, and when `time.monotonic()` reaches `until`, save and return the reason, unless that was the
    last step. If the guard decides on a rollback, return it once a pending save is complete. With several ranks only
    the first has a log and calls `on_step`, and what stops one rank stops all.

    Raises PrecisionError after too many skipped steps in a row, and after the guard has stopped the run, which is
    saved first.
    """
    train, reporter = run.recipe.train, StepReporter(run, log, on_step)
    if train.graphs:
        run.capture_graphs()
    with stop_signals() as received:
        try:
            while run.step < train.steps:
                if run.guard:
                    run.compute_in(fp8=run.guard.before_step(run.step))
                with run.recording():
                    loss = reporter.report(_measured_update(run))
                saver.poll()
                if run.guard and (rollback := run.guard.after_step(run.step, loss)):
                    saver.finish()
                    return rollback
                is_saved, stop = after_step(run.step, train, agreed_stop(run.world, received, until))
                if is_saved or (run.guard and run.guard.stops):
                    reporter.flush()
                    if log:
                        log.sync()
                    saver.save()
                if stop:
                    saver.finish()
                    return stop
        except PrecisionError:  # raised on all ranks alike
            saver.finish()
            raise
        saver.finish()
    return None


@dataclass(frozen=True)
class QueuedStep:
    """An optimizer step that has been queued on the device.

    `numbers`, FP32, are its summed loss, the norm of its gradients, the routers' summed losses and, if FP8 was watched,
    `Fp8Health.fractions`. If loss or norm is not finite, the step was skipped. `targets` is the number of tokens that
    losses are summed over.
    """

    step: int
    targets: int
    numbers: AsyncRead
    cost: PendingStepCost
    begun: DeviceEvent
    ended: DeviceEvent
    held_out_loss: float | None = None
    fp8: bool | None = None
    shadow: Shadow | None = None


class StepReporter:
    """Reports each step immediately on a CPU; on CUDA one step late, so that the GPU never waits. A run with a guard
    reports immediately everywhere, as the guard judges a step before the next one."""

    def __init__(self, run: Run, log: MetricsLog | None, on_step: OnStep) -> None:
        self._run, self._log, self._on_step = run, log, on_step
        self._pending: QueuedStep | None = None

    def report(self, step: QueuedStep) -> float:
        """Report a step, now or with the next one. Returns its mean loss, or NaN if it is reported later. Raises as
        `SkippedSteps.count`."""
        self.flush()
        self._pending = step
        return math.nan if reports_late(self._run) else self.flush()

    def flush(self) -> float:
        """Wait for the step that is not reported yet, and report it. Returns its mean loss; NaN if there is none."""
        step, self._pending = self._pending, None
        if step is None:
            return math.nan
        run = self._run
        total, norm, *others = step.numbers.read()
        names = run.model.router_losses.names if run.model.router_losses else ()
        router, health = others[: len(names)], others[len(names) :]
        loss, seconds = total / step.targets, step.begun.seconds_until(step.ended)
        run.skipped.count(step.step, loss, norm, run.recipe.train.max_skipped)
        metrics = StepMetrics(
            step=step.step,
            loss=loss,
            lr=run.learning_rate(step.step),
            grad_norm=norm,
            tokens=step.targets + (self._log.tokens if self._log else 0),
            tokens_per_second=step.targets / seconds,
            seconds=seconds,
            held_out_loss=step.held_out_loss,
            fp8=step.fp8,
            shadow=step.shadow,
            router={name: summed / step.targets for name, summed in zip(names, router, strict=True)},
            cost=step.cost.finish(seconds, health),
            skipped=run.skipped.running or None,
        )
        if self._log:
            self._log.write(metrics)
            self._on_step(metrics)
        return loss


def reports_late(run: Run) -> bool:
    """Whether a step is reported after the next one has been queued."""
    return run.device.type == "cuda" and run.guard is None


def _measured_update(run: Run) -> QueuedStep:
    run.meter.begin()
    begun = DeviceEvent(run.device)
    numbers, targets = update(run)
    if run.meter.health is not None:
        numbers = torch.cat([numbers, run.meter.health])
    reading, cost = AsyncRead(numbers), PendingStepCost.of(run.meter.flops, run.world, run.device)
    ended = DeviceEvent(run.device)
    train, held_out = run.recipe.train, None
    if run.held_out is not None and (run.step % train.eval_every == 0 or run.step == train.steps):
        held_out = held_out_loss(run.model, run.held_out, train.micro_batch_size)
    fp8 = run.in_fp8 if run.guard else None
    shadow = run.guard.take_shadow() if run.guard else None
    return QueuedStep(run.step, targets, reading, cost, begun, ended, held_out, fp8, shadow)


def update(run: Run) -> tuple[Tensor, int]:
    """One optimizer step. Returns its summed loss, the norm of its gradients and the summed losses of the routers, FP32
    `[2 + losses]`, and the number of targets.

    If loss or norm is not finite (on all ranks alike), weights and optimizer are left as they are, but the step counts.
    That is decided on the device, so that the host does not wait.
    """
    batches, targets, run.meter.flops = run.feed.update(run.position, run.model.model)
    bf16 = None
    if run.guard and run.in_fp8 and run.guard.wants_bf16_passes(run.step + 1):
        bf16 = bf16_passes(run, batches, targets)
    total, *router = accumulate_gradients(run, batches, targets)
    if run.guard and bf16:
        run.guard.compare(run.step + 1, bf16, float(total) / targets, run.optimizer.gradients, run.model.shards)
    numbers = torch.stack([total, run.optimizer.clip(), *router])
    skip = ~numbers[:2].isfinite().all()  # as `SkippedSteps.count`
    run.optimizer.step(run.learning_rate(run.step + 1), skip)
    if run.model.router_losses:
        run.model.router_losses.update_biases(skip)
    run.model.backend.forget_infinite(skip)
    if run.recorder:
        run.recorder.forget_infinite(skip)
    run.step += 1
    run.position += run.recipe.train.batch_size
    return numbers, targets
