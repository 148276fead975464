"""What is told of each update, and when: metrics, steps that were skipped, and why the run ends for them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from precisionctl.trainer.measure.meter import Metered
from precisionctl.trainer.measure.metrics import MetricsLog, StepMetrics
from precisionctl.trainer.run import Run
from precisionctl.trainer.shadow import Shadow
from precisionctl.trainer.transfers import Coming, Moment

OnStep = Callable[[StepMetrics], None]


@dataclass(frozen=True)
class Update:
    """One that a device was told to make: its `numbers`, in FP32, are the summed loss, the gradients' norm, and what
    FP8 was seen to do, if anything was. Where one of the first two is no number, it was not made."""

    step: int
    targets: int
    numbers: Coming
    taken: Metered
    begun: Moment
    ended: Moment
    held_out_loss: float | None = None
    fp8: bool | None = None
    shadow: Shadow | None = None


class Told:
    """Whoever hears of steps is told of each at once, or, where a device is busy, when the next one has been given to
    it: so it never waits for its host to have read what it did. Nobody else knows less for that: where a step is to be
    saved or judged, its numbers are waited for."""

    def __init__(self, run: Run, log: MetricsLog | None, on_step: OnStep) -> None:
        self._run, self._log, self._on_step = run, log, on_step
        self._waiting: Update | None = None

    def of(self, made: Update) -> float:
        """Tell of an update, sooner or later. Returns its loss; NaN while it is not known. Raises PrecisionError as
        `Skips.count`."""
        self.finish()
        self._waiting = made
        return math.nan if is_told_late(self._run) else self.finish()

    def finish(self) -> float:
        """Wait for what is to be told, and tell it."""
        made, self._waiting = self._waiting, None
        if made is None:
            return math.nan
        run = self._run
        total, norm, *health = made.numbers.read()
        loss, seconds = total / made.targets, made.begun.until(made.ended)
        run.skips.count(made.step, loss, norm, run.recipe.train.max_skipped)
        metrics = StepMetrics(
            step=made.step,
            loss=loss,
            lr=run.rate(made.step),
            grad_norm=norm,
            tokens=made.targets + (self._log.tokens if self._log else 0),
            tokens_per_second=made.targets / seconds,
            seconds=seconds,
            held_out_loss=made.held_out_loss,
            fp8=made.fp8,
            shadow=made.shadow,
            taken=made.taken.taken(seconds, health),
            skipped=run.skips.running or None,
        )
        if self._log:
            self._log.write(metrics)
            self._on_step(metrics)
        return loss


def is_told_late(run: Run) -> bool:
    """Whether a step is told of when the next one is under way. A guard judges each before the next."""
    return run.device.type == "cuda" and run.guard is None
