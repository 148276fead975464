"""The learning rate of an update: of the recipe's schedule, or of Megatron's that a run continues."""

import math

from precisionctl.recipe import Recipe, Schedule
from precisionctl.trainer.optimizer.megatron_schedule import MegatronSchedule


def rate_of_update(step: int, recipe: Recipe, schedule: MegatronSchedule | None) -> float:
    """The learning rate of update `step`, counted from 1: of the `schedule` that the run continues, else of the
    recipe."""
    if schedule:
        return schedule.rate(step, recipe.train.batch_size)
    return learning_rate(step, recipe.train.steps, recipe.optimizer.lr, recipe.schedule)


def learning_rate(step: int, steps: int, peak: float, schedule: Schedule) -> float:
    """The learning rate of update `step`, counted from 1, in a run of `steps` updates."""
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    floor = schedule.min_ratio
    match schedule.kind:
        case "constant":
            return peak
        case "cosine":
            done = min(1.0, (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps))
            return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
        case "wsd":
            done = min(1.0, max(0.0, 1 - (steps - step) / max(1, schedule.decay_steps)))
            return peak * (1 - (1 - floor) * done)
